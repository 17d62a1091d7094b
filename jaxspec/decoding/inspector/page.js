// Steps through a recorded decode. Only the current step is drawn; texts are set as text alone.

import {SMALL, element, treePicture, visible} from './tree_view.js';

const $ = id => document.getElementById(id);
const data = JSON.parse($('data').textContent);
const narrow = matchMedia('(max-width: 30rem)');
const LETTERS = 40; // of a token in the table
let row, at, timer; // the row shown, its step counted from 1, the clock of playing

const plural = (count, one, many = `${one}s`) => `${count} ${count === 1 ? one : many}`;
const percent = share => (share > 0 && share < 0.005 ? '<1%' : share < 1 && share >= 0.995 ? '>99%' : `${Math.round(100 * share)}%`);
const exact = share => (share === undefined || share === null ? '' : share.toPrecision(3));
const known = share => share !== undefined && share !== null;

function duration(seconds) {
  if (!known(seconds)) return 'not measured';
  return seconds >= 1 ? `${seconds.toPrecision(3)} s` : `${(1000 * seconds).toPrecision(3)} ms`;
}

function make(name, properties, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

/** Returns a row with what is needed at every step: sums up to each, its tree's nodes. */
function prepared(given) {
  let tokens = 0;
  const ends = given.steps.map(({count}) => (tokens += count));
  const times = given.steps.map(({seconds}) => seconds).filter(known).sort((a, b) => a - b);
  return {...given, ends, median: times[times.length >> 1], drafts: given.steps.some(({ids}) => ids.length > 1)};
}

const hasOwn = step => step.count === step.path.length;
const accepted = step => step.path.length - 1;
const offered = step => step.ids.length - 1 - step.unused.length;

/** Returns the nodes to draw: those that were offered, then the target's own token. */
function nodesOf(step, number) {
  const parents = data.trees[step.tree], kept = new Set(step.path), unused = new Set(step.unused), shown = [];
  parents.forEach((parent, node) => {
    if (unused.has(node)) return;
    const [draft, target] = [step.draft?.[node] ?? undefined, step.target?.[node] ?? undefined];
    const kind = node === 0 ? 'pending' : kept.has(node) ? 'accepted' : 'rejected';
    shown.push({node, parent, id: step.ids[node], name: data.texts[step.texts[node]], kind, draft, target});
  });
  if (hasOwn(step)) {
    const last = row.ends[number - 1] - 1;
    shown.push({node: parents.length, parent: step.path.at(-1), id: row.ids[last], name: row.pieces[last], kind: 'own', target: step.own ?? undefined});
  }
  return shown;
}

const MEANING = {pending: 'the pending token', accepted: 'accepted', rejected: 'rejected', own: "the target's own token"};

function described({id, kind, draft, target}) {
  const facts = [`id ${id}`, MEANING[kind]];
  if (known(draft)) facts.push(`draft probability ${exact(draft)}`);
  if (known(target)) facts.push(`target probability ${exact(target)}`);
  return facts.join('; ');
}

function note({draft, target}) {
  if (known(draft)) return known(target) ? `${percent(draft)} \u2192 ${percent(target)}` : `draft ${percent(draft)}`;
  return known(target) ? percent(target) : '';
}

function drawTree(step, number) {
  const nodes = nodesOf(step, number), places = new Map(nodes.map(({node}, place) => [node, place]));
  const parents = nodes.map(({parent}) => (parent < 0 ? -1 : places.get(parent) ?? 0));
  const noted = nodes.some(node => note(node));
  const size = {...SMALL, smallest: 1, column: 86};
  if (!narrow.matches) Object.assign(size, {width: 78, column: 94, letters: 9});
  if (noted) Object.assign(size, {height: 38, row: 45});
  const drawn = nodes.map(each => ({...each, note: note(each), share: each.target ?? each.draft, title: described(each)}));
  const words = step.path.map(node => data.texts[step.texts[node]]).join('');
  const picture = treePicture(parents, drawn, `Tree of ${plural(offered(step), 'drafted token')}, ${accepted(step)} accepted: ${words}`, size);
  const box = $('tree');
  box.style.minHeight = `${Math.min(Math.max(parseFloat(box.style.minHeight) || 0, box.scrollHeight), innerHeight * 0.6)}px`;
  box.replaceChildren(picture);
  const end = picture.querySelector('g.own') ?? [...picture.querySelectorAll('g.accepted, g.pending')].at(-1);
  const [inner, outer] = [end.getBoundingClientRect(), box.getBoundingClientRect()];
  box.scrollLeft = Math.max(0, box.scrollLeft + inner.right - outer.right + 12);
  box.scrollTop = Math.max(0, box.scrollTop + inner.bottom - outer.bottom + 12);
  if ($('nodes').open) fillTable(nodes);
}

function fillTable(nodes) {
  const unused = row.steps[at - 1].unused.length, lines = nodes.map(each => {
    const {node, parent, id, name, kind, draft, target} = each;
    const cells = [kind === 'own' ? '' : node, visible(name, LETTERS), id, parent < 0 ? '' : parent, exact(draft), exact(target), MEANING[kind]];
    return make('tr', {className: kind}, ...cells.map(cell => make('td', {textContent: cell})));
  });
  if (unused) lines.push(make('tr', {}, make('td', {colSpan: 7, textContent: `${plural(unused, 'node')} of the budget not offered`})));
  $('nodes').querySelector('tbody').replaceChildren(...lines);
}

function growText(number) {
  const box = $('tokens');
  while (box.childElementCount > number) box.lastElementChild.remove();
  for (let index = box.childElementCount; index < number; index++) {
    const step = row.steps[index], end = row.ends[index], start = end - step.count, line = make('span', {});
    for (let token = start; token < end; token++) {
      const text = row.pieces[token], drafted = token - start < accepted(step);
      const span = make('span', {className: drafted ? 'drafted' : 'own', textContent: text, title: `id ${row.ids[token]}; step ${index + 1}; ${drafted ? 'drafted and accepted' : "the target's own"}`});
      if (text.includes('\n')) span.classList.add('line');
      line.append(span);
    }
    box.append(line);
  }
  box.querySelector('.now')?.classList.remove('now');
  const now = box.lastElementChild, text = $('text');
  now.classList.add('now');
  const [inner, outer] = [now.getBoundingClientRect(), text.getBoundingClientRect()];
  if (inner.bottom > outer.bottom - 24 || inner.top < outer.top) text.scrollTop += inner.bottom - outer.bottom + 48;
}

function sentence(step) {
  const own = hasOwn(step) ? "then the target's own token" : 'then a stop ended the row';
  return offered(step) ? `${plural(offered(step), 'token')} offered, ${accepted(step)} accepted, ${own}` : `nothing drafted; the target's own token`;
}

function show(number) {
  const count = row.steps.length, step = row.steps[number - 1];
  at = number;
  $('step').value = number;
  $('step').setAttribute('aria-valuetext', `step ${number} of ${count}`);
  $('cursor').style.left = `${(100 * (number - 0.5)) / count}%`;
  $('place').replaceChildren(`Step ${number}`, make('span', {textContent: ` of ${count}`}));
  for (const [id, end] of [['first', 1], ['back', 1], ['next', count], ['last', count]]) $(id).setAttribute('aria-disabled', number === end);
  $('count').textContent = step.count;
  $('sources').textContent = `${accepted(step)} drafted, ${hasOwn(step) ? 1 : 0} the target's own`;
  $('tau').textContent = (row.ends[number - 1] / number).toFixed(2);
  $('width').textContent = step.width;
  $('offered').textContent = `tokens the target read; ${offered(step)} drafted, 1 pending${step.width > offered(step) + 1 ? ', the rest padding' : ''}`;
  $('took').textContent = duration(step.seconds);
  $('typical').textContent = known(row.median) ? `median ${duration(row.median)}${data.rows.length > 1 ? '; all rows together' : ''}` : 'the trace has no times';
  $('outcome').textContent = sentence(step);
  $('outcome').setAttribute('aria-live', timer ? 'off' : 'polite');
  growText(number);
  drawTree(step, number);
  $('end').textContent = number === count ? `End: ${row.finish}.` : '';
}

function go(number) {
  show(Math.min(Math.max(number, 1), row.steps.length));
}

function play(on) {
  clearInterval(timer);
  timer = undefined;
  if (on) {
    if (at === row.steps.length) go(1);
    timer = setInterval(() => {
      go(at + 1);
      if (at === row.steps.length) play(false);
    }, 1000 / $('speed').value);
  }
  document.body.classList.toggle('playing', on);
  $('play').setAttribute('aria-label', on ? 'Pause' : 'Play');
}

/** Draws a bar for each step: accepted tokens below, the target's own above. */
function drawBars() {
  const most = row.steps.reduce((most, {count}) => Math.max(most, count), 1), count = row.steps.length;
  const bar = (index, from, size) => (size ? `M${index + 0.12} ${most - from}h.76v${-size}h-.76z` : '');
  const drafted = row.steps.map((step, index) => bar(index, 0, Math.min(accepted(step), step.count)));
  const own = row.steps.map((step, index) => (hasOwn(step) ? bar(index, accepted(step), 1) : ''));
  $('bars').setAttribute('viewBox', `0 0 ${count} ${most}`);
  $('bars').replaceChildren(element('path', {class: 'drafted', d: drafted.join('')}), element('path', {class: 'own', d: own.join('')}));
  $('cursor').style.width = `${100 / count}%`;
}

function drawTime() {
  const {seconds, step_seconds: steps, compile_seconds: compiled, num_tokens: tokens, profile} = data, parts = [];
  if (known(seconds)) {
    const rest = Math.max(0, seconds - steps), split = make('div', {className: 'split'});
    for (const part of [steps, rest]) {
      const piece = make('div', {});
      piece.style.flexGrow = (100 * part) / seconds;
      split.append(piece);
    }
    const lines = [
      ['swatch steps', 'the steps', `${duration(steps)}, ${percent(steps / seconds)}`],
      ['swatch', 'the prompt and all else', `${duration(rest)}, ${percent(rest / seconds)}`],
      ['', `whole call, ${plural(tokens, 'token')}`, duration(seconds)],
    ];
    if (known(compiled)) lines.push(['', 'compilation, not counted', duration(compiled)]);
    parts.push(split, make('ul', {className: 'times'}, ...lines.map(([className, name, value]) => make('li', {}, make('span', {className, textContent: name}), make('b', {textContent: value})))));
    parts.push(make('p', {textContent: 'Draft, target pass and verification of a step are one program: how they share its time was not measured. A trace is recorded step by step from the host, so the same call without one is faster.'}));
  } else {
    parts.push(make('p', {textContent: 'This result has no times.'}));
  }
  if (profile) parts.push(make('p', {textContent: `Profile of drafting: a plain step takes ${duration(profile.plain_seconds)}, a step with drafts ${duration(profile.drafted_seconds)}, and tau is ${profile.tau.toFixed(2)} (bonus token included): ${profile.speedup.toFixed(2)} times plain speed, so the call ${profile.drafts ? 'drafts' : 'decodes plainly'}.`}));
  $('time').replaceChildren(...parts);
}

function open(index) {
  play(false);
  row = prepared(data.rows[index]);
  const count = row.steps.length, method = row.drafts ? data.drafter : 'Plain decoding';
  document.querySelector('main').hidden = !count;
  $('nothing').hidden = Boolean(count);
  $('facts').textContent = count ? `${method}: ${plural(row.ids.length, 'token')} in ${plural(count, 'target pass', 'target passes')}, tau ${(row.ids.length / count).toFixed(2)} (bonus token included)` : '';
  if (!count) return;
  $('step').max = count;
  $('tokens').replaceChildren();
  $('prompt').textContent = row.prompt;
  $('tree').style.minHeight = '';
  const drawn = row.steps.some(({draft}) => draft), scored = row.steps.some(({target, own}) => target || known(own));
  const kind = row.warped ? 'after temperature, filters and penalties' : 'before temperature and filters';
  const target = `the target's, ${kind}`;
  $('probabilities').textContent = scored ? `Probabilities given the nodes before: ${drawn ? `the draft's \u2192 ${target}` : target}.` : drawn ? "Probabilities are the draft's; warped_logprobs=True also records the target's." : "No probabilities were recorded; warped_logprobs=True records the target's.";
  drawBars();
  drawTime();
  show(1);
}

function press(event) {
  const {key, target} = event;
  if (event.ctrlKey || event.metaKey || event.altKey || !row.steps.length || target.closest('select')) return;
  const way = {ArrowLeft: () => go(at - 1), ArrowRight: () => go(at + 1), Home: () => go(1), End: () => go(row.steps.length), ' ': () => play(!timer)}[key];
  if (!way || (key === ' ' && target.closest('button, summary'))) return;
  event.preventDefault();
  if (key !== ' ') play(false);
  way();
}

data.rows.forEach(({name}, index) => $('row').append(make('option', {value: index, textContent: name})));
$('row-choice').hidden = data.rows.length < 2;
$('row').addEventListener('change', () => open(Number($('row').value)));
$('step').addEventListener('input', () => { play(false); go(Number($('step').value)); });
for (const [id, way] of [['first', () => 1], ['back', () => at - 1], ['next', () => at + 1], ['last', () => row.steps.length]]) $(id).addEventListener('click', () => { play(false); go(way()); });
$('play').addEventListener('click', () => play(!timer));
$('speed').addEventListener('change', () => play(Boolean(timer)));
$('nodes').addEventListener('toggle', () => $('nodes').open && fillTable(nodesOf(row.steps[at - 1], at)));
narrow.addEventListener('change', () => row.steps.length && show(at));
addEventListener('keydown', press);
open(0);
