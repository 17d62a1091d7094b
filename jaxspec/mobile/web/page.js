// The page: sends clicks and text to the worker, and shows its answers, as text only.

import {deleteStored, megabytes, recall, remember, storedBytes} from './storage.js';
import {treePicture} from './tree_view.js';

const $ = id => document.getElementById(id);
const PLAIN = 'decode';
const REDRAW = 150; // milliseconds
const NEEDED = ['model.tflite', 'tokenizer.json'];
const CONTROLS = ['prompt', 'send', 'measure', 'profile', 'new', 'accelerator'];
// On a touch screen, focus in the prompt brings up a keyboard that hides the text.
const touch = matchMedia('(pointer: coarse)');
const ENDS = {stop: '', length: 'The token budget ended here.', room: 'The text is as long as the model can read: begin a new one.', stopped: 'Stopped.'};

let profile = null, worker = null, ready = null, answer = null, started = false, example = null;
const tally = {counts: [], calls: 0};

// ---- words for the user -------------------------------------------------------------------------

function notice(text, bad = false) {
  const line = document.createElement('p');
  line.className = bad ? 'notice bad' : 'notice';
  line.setAttribute('role', bad ? 'alert' : 'note');
  line.textContent = text;
  $('notices').append(line);
}

function progress(label, share) {
  $('progress').hidden = label === null;
  if (label === null) return;
  $('progress-label').textContent = label;
  if (share === null) $('bar').removeAttribute('value');
  else $('bar').value = share;
}

const shares = {
  download: ({done, total}) => [`Downloading the model: ${megabytes(done)} of ${megabytes(total)}`, done / total],
  runtime: () => ['Loading LiteRT.js, which runs the model (about 10 MB, once)', null],
  compile: () => ['Compiling the model for this device', null],
  'self-test': () => ['Testing that this device computes rightly', null],
  measure: ({done}) => ['Measuring this device: plain decoding and each tree, in turns', done],
  prompt: ({done, total}) => (done < total ? [`Reading the text: ${done} of ${total} tokens`, done / total] : [null]),
  kit: ({done, total}) => [`Downloading the kit: ${megabytes(done)} of ${megabytes(total)}`, done / total],
  'kit-measure': ({done}) => ['Timing passes of several sizes', done],
};

function nameOf(choice) {
  if (choice === PLAIN) return 'plain decoding';
  const tree = profile.trees.find(({signature}) => signature === choice);
  if (!tree) return choice;
  return tree.nodes === tree.depth ? `chain of ${tree.nodes}` : `tree of ${tree.nodes}, ${tree.depth} deep`;
}

// ---- the model ----------------------------------------------------------------------------------

async function boot() {
  let response = null;
  try {
    response = await fetch('profile.json', {cache: 'no-cache'});
    if (!response.ok) throw new Error(`the server answered ${response.status}`);
    profile = await response.json();
    if (profile.format !== 2) throw new Error('it is of another version of jaxspec; export the page again');
  } catch (error) {
    $('model-facts').textContent = 'There is no model here.';
    notice(`profile.json, which describes the model, cannot be read: ${error.message}.`, true);
    return;
  }
  $('model-name').textContent = `\u00b7 ${profile.model}, ${profile.quantization}`;
  for (const choice of [PLAIN, ...profile.trees.map(({signature}) => signature)]) {
    $('choice').append(new Option(nameOf(choice), choice));
  }
  if (!profile.chat) {
    $('mode').value = 'text';
    $('mode').disabled = true;
  }
  showExamples();
  const whole = await showStored();
  $('accelerator').value = recall('accelerator') ?? 'auto';
  $('load').disabled = false;
  if (whole) start();
}

/** Offers prompts that the model can do; each begins a text of its own. */
function showExamples() {
  for (const each of profile.examples ?? []) {
    const button = document.createElement('button');
    Object.assign(button, {type: 'button', textContent: each.text, title: each.text, disabled: true});
    button.addEventListener('click', () => {
      example = each;
      worker.postMessage({type: 'forget'});
    });
    $('examples').append(button);
    $('examples').hidden = false;
  }
}

function fileOf(name) {
  const current = Object.values(profile.files).map(({sha256}) => sha256);
  return {name, url: new URL(name, location.href).href, current, ...profile.files[name]};
}

const modelFile = () => fileOf('model.tflite');

/** Shows the stored files; returns true if nothing is missing. */
async function showStored() {
  const names = Object.keys(profile.files), sizes = await Promise.all(names.map(name => storedBytes(fileOf(name))));
  const kept = sizes.reduce((sum, size) => sum + size, 0), whole = NEEDED.every(name => sizes[names.indexOf(name)]);
  const bytes = NEEDED.reduce((sum, name) => sum + fileOf(name).bytes, 0);
  const where = whole ? `kept in this browser (${megabytes(kept)})` : `a download of ${megabytes(bytes)}`;
  $('model-facts').textContent = `${profile.model} in ${profile.quantization}, texts of up to ${profile.capacity} tokens: ${where}.`;
  $('delete').hidden = !kept;
  if (!ready && !started) $('load').textContent = whole ? 'Load the model' : `Load the model (${megabytes(bytes)})`;
  return whole;
}

async function pickAccelerator() {
  const wish = $('accelerator').value;
  if (wish === 'wasm') return 'wasm';
  const adapter = await navigator.gpu?.requestAdapter().catch(() => null);
  const software = adapter?.info?.isFallbackAdapter ?? adapter?.isFallbackAdapter ?? false;
  if (adapter && !(software && wish === 'auto')) return 'webgpu';
  if (adapter) {
    notice('WebGPU is computed by the CPU in this browser: the model runs there by wasm instead.');
    return 'wasm';
  }
  const why = isSecureContext ? 'This browser or device offers no WebGPU' : 'Browsers offer WebGPU to secure addresses only (https, or localhost)';
  notice(`${why}: the model runs on the CPU, by wasm.`);
  return 'wasm';
}

async function start() {
  if (started) return;
  started = true;
  $('load').disabled = true;
  $('accelerator').disabled = true;
  $('notices').replaceChildren();
  begin(await pickAccelerator());
}

function begin(accelerator, handed = null) {
  const {heap_bytes: heap, heap_limit: limit} = profile, {bytes} = modelFile();
  if ((accelerator === 'wasm' ? heap : bytes) > limit) {
    failed(`This model needs about ${megabytes(accelerator === 'wasm' ? heap : bytes)} of memory in a page, and browsers give ${megabytes(limit)}. It was not loaded: export it with fewer bits or fewer trees, or take a smaller model.`);
    return;
  }
  const threads = accelerator === 'wasm' && self.crossOriginIsolated && typeof SharedArrayBuffer === 'function';
  if (accelerator === 'wasm' && !threads) {
    notice('The browser keeps threads (SharedArrayBuffer) from this page, so one core does all the work: the server has to send the headers COOP and COEP, as jaxspec serve does, from https or localhost.');
  }
  worker?.terminate();
  worker = new Worker('worker.js');
  worker.onmessage = ({data}) => receivers[data.type](data);
  worker.onerror = event => failed(`The worker stopped: ${event.message || 'worker.js could not be loaded'}.`);
  worker.accelerator = accelerator;
  worker.asked = threads;
  worker.threads = threads ? navigator.hardwareConcurrency : 1;
  const times = recall('times')?.[kind()] ?? null;
  const task = {profile, accelerator, threads, file: modelFile(), coderFile: fileOf('tokenizer.json'), times, handed};
  worker.postMessage({type: 'start', ...task}, handed ? [handed.buffer] : []);
}

/** Name under which the times of a visit are kept. */
const kind = () => [modelFile().sha256, worker.accelerator, worker.asked, navigator.userAgent].join(' ');

/** Ends the model's worker and its state. */
function end() {
  progress(null);
  takeBack();
  worker?.terminate();
  worker = ready = null;
  started = false;
  if ($('log').lastElementChild?.classList.contains('turn')) {
    const line = document.createElement('p');
    line.className = 'divider';
    line.textContent = 'Here the model begins anew: it has not read what stands above.';
    $('log').append(line);
  }
  enable(false);
}

function failed(message) {
  notice(message, true);
  end();
  $('model').open = true;
  $('load').disabled = false;
  $('load').textContent = 'Try again';
  $('accelerator').disabled = false;
}

function enable(on, busy = false) {
  for (const control of [...CONTROLS.map($), ...$('examples').querySelectorAll('button')]) control.disabled = !on || busy;
  $('stop').disabled = !(on && busy && answer);
  $('log').setAttribute('aria-busy', String(busy));
}

const receivers = {
  progress(message) {
    progress(...shares[message.part](message));
  },

  model({from, problem}) {
    if (problem) notice(problem);
    if (from !== 'page') $('start').dataset.from = from;
    navigator.storage?.persist?.().catch(() => {});
    showStored();
  },

  runtime({threads}) {
    if (worker.accelerator !== 'wasm' || threads === worker.asked) return;
    worker.threads = 1;
    notice('This browser\u2019s wasm lacks relaxed SIMD, without which LiteRT.js has no threads: one core does all the work.');
  },

  tested({missing, message}) {
    if (missing) notice(message);
    $('start').dataset.test = message;
  },

  refused({message, handed}) {
    if (worker.accelerator !== 'webgpu') {
      failed(`${message} On this device the model cannot be trusted, so the page does not use it.`);
      return;
    }
    notice(`${message} The page continues with wasm, on the CPU.`);
    begin('wasm', handed);
  },

  ready(message) {
    ready = message;
    progress(null);
    $('load').textContent = 'Loaded';
    $('model').open = false;
    const cores = worker.threads > 1 ? `, ${worker.threads} threads` : '';
    $('facts').textContent = `Runs on this device by ${ready.accelerator === 'webgpu' ? 'WebGPU' : `wasm${cores}`}. Nothing you write leaves it.`;
    $('panel').hidden = false;
    Object.assign($('panel').dataset, {best: ready.best, accelerator: ready.accelerator});
    showCandidates(ready.speeds, ready.best);
    showTally();
    enable(true);
    const others = Object.entries(recall('times') ?? {}).filter(([key]) => key.startsWith(modelFile().sha256));
    remember('times', {...Object.fromEntries(others), [kind()]: ready.times});
    focusPrompt();
  },

  text(message) {
    if (!answer) return;
    append(answer.text, message.pieces);
    answer.ids.push(...message.ids);
    for (const count of message.counts) tally.counts[count] = (tally.counts[count] ?? 0) + 1;
    Object.assign(tally, {calls: message.calls, tokens: message.tokens, time: message.decodeTime, clock: message.clock});
    answer.last = message;
    // Drawing takes cores from the model: text comes with every frame, the panel less often.
    if (performance.now() - answer.drawn > REDRAW) showPanel();
  },

  done({reason}) {
    progress(null);
    if (reason === 'unread') {
      takeBack();
    } else {
      showPanel();
      const why = document.createElement('span');
      why.className = 'end';
      why.textContent = ENDS[reason];
      answer.line.append(why);
      Object.assign(answer.line.dataset, {ids: JSON.stringify(answer.ids), reason});
      answer = null;
    }
    enable(true);
    focusPrompt();
  },

  forgotten() {
    $('log').replaceChildren();
    $('speed').hidden = true;
    focusPrompt();
    if (!example) return;
    $('mode').value = example.mode;
    $('prompt').value = example.text;
    example = null;
    send();
  },

  kit({seconds}) {
    progress(null);
    enable(true);
    save(seconds);
    showStored();
  },

  error({fatal, message}) {
    if (fatal) {
      failed(message);
      return;
    }
    notice(message, true);
    progress(null);
    takeBack();
    enable(true);
    focusPrompt();
  },
};

/** Puts a text that was not answered back into the prompt. */
function takeBack() {
  if (!answer) return;
  answer.line.remove();
  answer.asked.remove();
  if (!$('prompt').value) $('prompt').value = answer.prompt;
  answer = null;
}

function focusPrompt() {
  if (!touch.matches) $('prompt').focus({preventScroll: true});
}

// ---- the conversation ---------------------------------------------------------------------------

function turn(kind) {
  const line = document.createElement('p');
  line.className = `turn ${kind}`;
  $('log').append(line);
  return line;
}

function append(parent, pieces) {
  const log = $('log'), following = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  for (const [piece, drafted] of pieces) {
    const last = parent.lastChild, kind = drafted ? 'drafted' : '';
    if (last && last.className === kind && !drafted) {
      last.textContent += piece;
      continue;
    }
    const span = document.createElement('span');
    span.className = kind;
    span.textContent = piece;
    parent.append(span);
  }
  if (following) log.scrollTop = log.scrollHeight;
}

function send() {
  const text = $('prompt').value, mode = $('mode').value;
  if (!text.trim() || !ready || answer) return;
  $('notices').replaceChildren();
  const asked = turn('person');
  asked.textContent = text;
  const line = turn('model');
  const words = document.createElement('span');
  line.append(words);
  answer = {line, asked, text: words, ids: [], prompt: text, drawn: -Infinity, last: {}};
  Object.assign(tally, {counts: [], calls: 0, tokens: 0, time: 0, clock: {run: 0, read: 0}});
  $('prompt').value = '';
  enable(true, true);
  $('stop').focus({preventScroll: true});
  const maxTokens = Math.max(1, Math.floor(Number($('tokens').value) || 256));
  worker.postMessage({type: 'reply', text, mode, maxTokens, choice: $('choice').value});
}

// ---- the inside panel ---------------------------------------------------------------------------

/** Draws bars; `most` is the value that fills one. */
function bars(place, rows, most) {
  place.replaceChildren(...rows.flatMap(({name, value, label, detail, best}) => {
    const cells = ['name', 'track', 'value'].map(kind => {
      const cell = document.createElement('div');
      cell.className = best ? `${kind} best` : kind;
      return cell;
    });
    cells[0].textContent = name;
    const fill = document.createElement('div');
    fill.className = 'fill';
    fill.style.width = `${100 * value / (most || 1)}%`;
    cells[1].append(fill);
    cells[2].textContent = label;
    if (detail) {
      const small = document.createElement('small');
      small.textContent = detail;
      cells[2].append(' ', small);
    }
    return cells;
  }));
}

function showPanel() {
  const {choice, view, speeds} = answer.last;
  answer.drawn = performance.now();
  if (choice) showStep(choice, view);
  showTally();
  if (speeds) showCandidates(speeds, choice ?? ready.best);
}

function showCandidates(speeds, best) {
  const names = Object.keys(speeds);
  bars($('candidates'), names.map(name => ({
    name: nameOf(name), value: speeds[name], best: name === best,
    label: round(speeds[name]),
    detail: name === PLAIN ? '' : `${round(speeds[name] / speeds[PLAIN], 2)} \u00d7 plain`,
  })), Math.max(...Object.values(speeds)));
}

function showStep(choice, view) {
  $('tree-name').textContent = `\u00b7 ${nameOf(choice)}`;
  const tree = profile.trees.find(({signature}) => signature === choice);
  if (tree && view.drafted.length) {
    const {names, path} = view;
    const nodes = tree.parents.map((_, node) => ({name: names[node] ?? '', kind: path.includes(node) ? 'accepted' : ''}));
    const label = `Tree of ${nodes.length - 1} drafted tokens, ${path.length - 1} accepted: ${path.map(node => names[node]).join('')}`;
    $('tree').replaceChildren(treePicture(tree.parents, nodes, label));
  } else {
    $('tree').textContent = 'Plain decoding drafts nothing.';
  }
}

function showTally() {
  const {counts, calls, tokens, time, clock} = tally;
  const depth = Math.max(profile.depth, counts.length - 1), drafts = counts.reduce((sum, count) => sum + (count ?? 0), 0);
  bars($('histogram'), Array.from({length: depth + 1}, (_, accepted) => {
    const count = counts[accepted] ?? 0;
    return {name: String(accepted), value: count, best: accepted > 0, label: drafts ? `${Math.round(100 * count / drafts)} %` : '0 %'};
  }), drafts);
  if (!calls) {
    if (!$('tree').firstChild) $('tree').textContent = 'Send something, and it is drawn here.';
    bars($('time'), ['the model', 'reading back', 'the page'].map(name => ({name, value: 0, label: ''})), 1);
    return;
  }
  // Calls of a GPU return before it has computed; reading their results waits for it.
  const reading = ready.accelerator === 'webgpu' ? 'waiting for the GPU' : 'reading back';
  const parts = {'the model': clock.run, [reading]: clock.read, 'the page': Math.max(0, time - clock.run - clock.read)};
  bars($('time'), Object.entries(parts).map(([name, spent]) => ({
    name, value: spent, best: name !== 'the page', label: `${(spent / calls).toFixed(2)} ms, ${(100 * spent / time).toFixed(1)} %`,
  })), time);
  // The plain speed is the one of the chart, as this device is now; without drafts, this speed is it.
  const speed = 1000 * tokens / time, plain = (answer.last.speeds ?? ready.speeds)[PLAIN];
  const small = document.createElement('small');
  small.textContent = drafts ? `${round(speed / plain, 2)} times plain decoding; ${round(tokens / calls, 2)} tokens a call, bonus included` : 'by plain decoding';
  $('speed').replaceChildren(`${round(speed)} tokens/s `, small);
  $('speed').hidden = false;
}

function round(value, digits = value < 10 ? 1 : 0) {
  return value.toFixed(digits);
}

/** A file for `jaxspec tune profile --import`. */
function save(seconds) {
  const entry = {
    jaxspec_web: 1,
    model: profile.model,
    quantization: profile.quantization,
    levels: profile.kit.levels,
    device: navigator.userAgent,
    runtime: `LiteRT.js, ${worker.accelerator}, ${worker.threads} threads`,
    seconds,
    steps: Object.fromEntries(Object.entries(ready.times).map(([name, {median, spread}]) => [name, [median / 1000, spread / 1000]])),
  };
  const link = document.createElement('a');
  link.href = URL.createObjectURL(new Blob([JSON.stringify(entry, null, 2)], {type: 'application/json'}));
  link.download = `jaxspec-profile-${profile.model}.json`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

// ---- clicks and keys ----------------------------------------------------------------------------

$('load').addEventListener('click', start);
$('accelerator').addEventListener('change', () => {
  remember('accelerator', $('accelerator').value);
  if (!ready) return;
  end();
  start();
});
$('delete').addEventListener('click', async () => {
  await deleteStored();
  await showStored();
  $(ready ? 'accelerator' : 'load').focus({preventScroll: true}); // its own button is gone
  notice('The stored model was deleted; it will be downloaded again when it is next loaded.');
});
$('form').addEventListener('submit', event => {
  event.preventDefault();
  send();
});
$('prompt').addEventListener('keydown', event => {
  if (event.key === 'Enter' && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
$('stop').addEventListener('click', () => worker?.postMessage({type: 'stop'}));
document.addEventListener('keydown', event => {
  if (event.key === 'Escape' && answer) worker?.postMessage({type: 'stop'});
});
$('new').addEventListener('click', () => worker?.postMessage({type: 'forget'}));
$('measure').addEventListener('click', () => {
  enable(true, true);
  worker.postMessage({type: 'measure'});
});
$('profile').addEventListener('click', () => {
  const {heap_bytes: model, heap_limit: limit, kit} = profile;
  if (model + kit.heap_bytes > limit) {
    notice('Model and kit together need more memory than a page gets: the profile cannot be measured here.', true);
    return;
  }
  enable(true, true);
  worker.postMessage({type: 'kit', file: fileOf('kit.tflite')});
});

boot();
