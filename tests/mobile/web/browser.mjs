// Drives Chromium as a person would: one scenario per line of standard input, one answer per line.
import {createRequire} from 'node:module';
import readline from 'node:readline';

const require = createRequire(`${process.env.PLAYWRIGHT_FOLDER}/`);
const {chromium} = require('playwright-core');
const FLAGS = [
  ...(process.getuid?.() === 0 ? ['--no-sandbox'] : []),
  '--enable-unsafe-webgpu', '--use-webgpu-adapter=swiftshader', '--enable-features=Vulkan', '--use-vulkan=swiftshader',
  '--host-resolver-rules=MAP phone.test 127.0.0.1', // an address that is not secure
];
const LONG = 240000;
const browser = await chromium.launch({executablePath: process.env.CHROMIUM, args: FLAGS, ignoreDefaultArgs: ['--hide-scrollbars']});

async function open(task) {
  const context = await browser.newContext({viewport: {width: 420, height: 900}, acceptDownloads: true});
  const requests = [], problems = [], errors = [];
  context.on('request', request => requests.push([request.method(), request.url()]));
  const page = await context.newPage();
  page.setDefaultTimeout(LONG);
  page.on('pageerror', error => problems.push(error.message));
  page.on('console', message => /Content Security Policy/i.test(message.text()) && problems.push(message.text()));
  page.on('console', message => message.type() === 'error' && errors.push(message.text()));
  if (task.quota) {
    const devtools = await context.newCDPSession(page);
    await devtools.send('Storage.overrideQuotaForOrigin', {origin: new URL(task.url).origin, quotaSize: task.quota});
  }
  if (task.noWebGpu) await context.addInitScript(() => Object.defineProperty(Navigator.prototype, 'gpu', {get: () => undefined}));
  if (task.noStorage) await context.addInitScript(() => ['caches', 'localStorage'].forEach(name => Object.defineProperty(self, name, {get() { throw new DOMException('denied', 'SecurityError'); }})));
  await page.goto(task.url);
  return {context, page, requests, problems, errors};
}

/** Sends a text elsewhere, in a page; returns the policy's directive that refused it. */
const send = url => new Promise(resolve => {
  self.addEventListener('securitypolicyviolation', event => resolve(event.effectiveDirective), {once: true});
  fetch(url, {method: 'POST', mode: 'no-cors', body: 'text'}).then(() => resolve('sent'), () => setTimeout(resolve, 1000, 'failed'));
});

/** The page of a traced result at the step that is shown. */
const inspected = page => page.evaluate(() => ({
  step: Number(document.querySelector('#step').value),
  place: document.querySelector('#place').textContent,
  text: document.querySelector('#tokens').textContent,
  prompt: document.querySelector('#prompt').textContent,
  drafted: document.querySelectorAll('#tokens .drafted').length,
  elements: document.querySelectorAll('#text *:not(span)').length,
  nodes: ['pending', 'accepted', 'rejected', 'own'].map(kind => document.querySelectorAll(`#tree g.${kind}`).length),
  tau: document.querySelector('#tau').textContent,
  width: document.querySelector('#width').textContent,
  facts: document.querySelector('#facts').textContent,
  probabilities: document.querySelector('#probabilities').textContent,
  time: document.querySelector('#time').textContent,
  outcome: document.querySelector('#outcome').textContent,
  play: document.querySelector('#play').getAttribute('aria-label'),
  empty: document.querySelector('main').hidden,
}));

/** What people with weak eyes, a small screen or no mouse would stumble over. */
function looks() {
  const parse = color => color.match(/[\d.]+/g).map(Number);
  const opaque = color => color !== 'none' && (parse(color)[3] ?? 1) === 1;
  const light = color => parse(color).slice(0, 3).map(each => (each / 255 <= 0.03928 ? each / 255 / 12.92 : ((each / 255 + 0.055) / 1.055) ** 2.4)).reduce((sum, each, at) => sum + each * [0.2126, 0.7152, 0.0722][at], 0);
  const contrast = (a, b) => (Math.max(light(a), light(b)) + 0.05) / (Math.min(light(a), light(b)) + 0.05);
  const behind = element => {
    const {backgroundColor} = getComputedStyle(element);
    return opaque(backgroundColor) ? backgroundColor : behind(element.parentElement);
  };
  const shown = element => element.checkVisibility() && !element.closest('.hidden') && !element.closest(':disabled');
  const texts = [], edges = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const {parentElement: element, textContent: text} = walker.currentNode;
    if (!text.trim() || !shown(element) || element.closest('script, noscript, option')) continue;
    const box = element.closest('svg') && element.parentElement.querySelector('rect');
    const [ink, ground] = box ? [getComputedStyle(element).fill, getComputedStyle(box).fill] : [getComputedStyle(element).color, behind(element)];
    texts.push({text: text.trim().slice(0, 30), contrast: contrast(ink, ground), size: parseFloat(getComputedStyle(element).fontSize) * (box ? box.getBoundingClientRect().width / box.width.baseVal.value : 1)});
  }
  const prompt = document.querySelector('textarea');
  if (prompt) texts.push({text: 'placeholder', contrast: contrast(getComputedStyle(prompt, '::placeholder').color, behind(prompt)), size: 16});
  const controls = [...document.querySelectorAll('button, select, input, textarea')].filter(shown);
  for (const each of controls) edges.push({id: each.id, contrast: Math.max(contrast(getComputedStyle(each).borderColor, behind(each.parentElement)), contrast(behind(each), behind(each.parentElement)))});
  for (const each of document.querySelectorAll('.bars .fill')) edges.push({id: 'bar', contrast: contrast(getComputedStyle(each).backgroundColor, behind(each.parentElement))});
  return {
    texts, edges,
    unnamed: controls.filter(each => !(each.labels?.length || each.textContent.trim() || each.ariaLabel)).map(({id}) => id),
    small: controls.filter(each => each.getBoundingClientRect().height < 24).map(({id}) => id),
    overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  };
}

const settled = page => page.waitForFunction(() => !document.querySelector('#send').disabled || document.querySelector('.notice.bad'));
/** The controls of the model, which are folded away after loading. */
const unfold = page => page.evaluate(() => { document.querySelector('#model').open = true; });
const notices = page => page.$$eval('.notice', lines => lines.map(line => line.textContent));

async function load(page, accelerator) {
  await page.waitForFunction(() => !document.querySelector('#load').disabled || document.querySelector('.notice.bad'));
  if (await page.isDisabled('#load')) return;
  await page.selectOption('#accelerator', accelerator);
  await page.focus('#load');
  await page.keyboard.press('Enter');
  await settled(page);
}

/** Presses Escape as soon as a turn is longer: this script would hear of it when a tiny model has long come to its end. */
function escapeAfter([turn, length]) {
  const watch = new MutationObserver(() => {
    if ((document.querySelectorAll('.turn.model')[turn]?.textContent.length ?? 0) <= length) return;
    watch.disconnect();
    document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape', bubbles: true}));
  });
  watch.observe(document.body, {subtree: true, childList: true, characterData: true});
}

async function write(page, text, {choice = 'auto', mode = 'text', tokens = 64, stopAfter = null} = {}) {
  await page.selectOption('#choice', choice);
  await page.selectOption('#mode', mode);
  await page.fill('#tokens', String(tokens));
  await page.fill('#prompt', ''); // a refused text stands there again
  await page.focus('#prompt');
  await page.keyboard.insertText(text);
  const before = (await page.$$('.turn.model')).length;
  if (stopAfter !== null) await page.evaluate(escapeAfter, [before, stopAfter]);
  await page.keyboard.press('Enter');
  await page.waitForFunction(before => document.querySelectorAll('.turn.model')[before]?.dataset.reason || document.querySelector('.notice.bad'), before);
  const answer = await page.$$eval('.turn.model', (lines, before) => {
    const line = lines[before];
    return line && {ids: JSON.parse(line.dataset.ids), reason: line.dataset.reason, text: line.firstChild.textContent, drafted: line.querySelectorAll('.drafted').length, elements: line.querySelectorAll('*:not(span)').length};
  }, before);
  return {...answer, notices: await notices(page), speed: await page.textContent('#speed'), time: await page.textContent('#time'), asked: await page.$$eval('.turn.person', lines => lines.at(-1)?.textContent)};
}

const facts = page => page.evaluate(() => ({
  best: document.querySelector('#panel').dataset.best,
  accelerator: document.querySelector('#panel').dataset.accelerator,
  from: document.querySelector('#start').dataset.from,
  test: document.querySelector('#start').dataset.test,
  facts: document.querySelector('#facts').textContent,
  model: document.querySelector('#model-facts').textContent,
  candidates: document.querySelectorAll('#candidates .name').length,
  chart: [...document.querySelectorAll('#candidates .name, #candidates .value')].map(({textContent}) => textContent),
  overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  folded: !document.querySelector('#model').open,
}));

const scenarios = {
  /** Loads, and says how it went. */
  async load(task) {
    const {page, requests, problems} = await open(task);
    await load(page, task.accelerator ?? 'wasm');
    const answer = {...await facts(page), notices: await notices(page), ready: await page.isEnabled('#send'), load: await page.textContent('#load'), retry: await page.isEnabled('#load'), requests, problems};
    if (task.texts) answer.texts = [];
    for (const each of task.texts ?? []) answer.texts.push(await write(page, each.text, each));
    answer.still = await page.isEnabled('#prompt');
    return answer;
  },

  /** A whole visit, then another one. */
  async visit(task) {
    const {page, requests, problems, errors} = await open(task), answer = {requests, problems, errors};
    await page.waitForSelector('#load:enabled');
    const paint = () => page.evaluate(() => performance.getEntriesByType('paint').find(({name}) => name === 'first-contentful-paint')?.startTime);
    answer.paints = [await paint()];
    while (answer.paints.length < 3) { // what else the machine does is not counted
      await page.reload();
      await page.waitForSelector('#load:enabled');
      answer.paints.push(await paint());
    }
    await load(page, task.accelerator);
    answer.first = {...await facts(page), notices: await notices(page)};
    answer.texts = [];
    for (const each of task.texts) {
      if (each.fresh) await page.click('#new');
      answer.texts.push(await write(page, each.text, each));
    }
    answer.panel = await page.evaluate(() => ({
      nodes: document.querySelectorAll('svg.tree rect').length,
      bars: document.querySelectorAll('#histogram .name').length,
      speed: document.querySelector('#speed').textContent,
      time: document.querySelector('#time').textContent,
    }));
    await page.selectOption('#choice', 'auto');
    await page.selectOption('#mode', 'text');
    if (task.download) {
      const [download] = await Promise.all([page.waitForEvent('download'), page.click('#profile')]);
      await download.saveAs(task.download);
    }
    answer.requestsOfFirst = requests.length;
    await page.reload();
    await settled(page); // a stored model loads by itself
    answer.second = {...await facts(page), notices: await notices(page)};
    await unfold(page);
    await page.click('#delete');
    await page.waitForSelector('#delete', {state: 'hidden'});
    answer.deleted = (await facts(page)).model;
    return answer;
  },

  /** After an answer: contrast and sizes, wide and narrow, light and dark; what Tab reaches. */
  async look(task) {
    const {page, problems} = await open(task), answer = {problems, looks: []};
    await load(page, 'wasm');
    for (const each of task.texts) await write(page, each.text, each);
    await unfold(page);
    for (const width of task.widths) {
      for (const scheme of ['light', 'dark']) {
        await page.setViewportSize({width, height: 800});
        await page.emulateMedia({colorScheme: scheme});
        answer.looks.push({width, scheme, ...await page.evaluate(looks)});
      }
    }
    await page.evaluate(() => document.activeElement.blur());
    answer.reached = [];
    for (let press = 0; press < 25; press++) {
      await page.keyboard.press('Tab');
      answer.reached.push(await page.evaluate(() => document.activeElement.id));
    }
    return answer;
  },

  /** Loads each address in turn, in one visit to a server, doing something with storage between. */
  async again(task) {
    const {page, requests, problems} = await open(task), answer = {requests, problems, visits: []};
    for (const {url, damage, remove} of task.visits) {
      await page.goto(url);
      await page.waitForFunction(() => !document.querySelector('#load').disabled || !document.querySelector('#send').disabled || document.querySelector('#load').textContent === 'Loaded');
      if (await page.isEnabled('#load')) await load(page, 'wasm');
      else await settled(page);
      answer.visits.push({...await facts(page), notices: await notices(page)});
      if (damage) {
        await page.evaluate(async () => {
          const cache = await caches.open('jaxspec-models');
          for (const request of await cache.keys()) {
            const {size} = await (await cache.match(request)).blob();
            await cache.put(request, new Response(new Uint8Array(size), {headers: {'Content-Length': String(size)}}));
          }
        });
      }
      if (remove) {
        await unfold(page);
        await page.click('#delete');
        await page.waitForSelector('#delete', {state: 'hidden'});
      }
    }
    return answer;
  },

  /** What the policy refuses, in the page and in its worker. */
  async policy(task) {
    const {page} = await open(task);
    await load(page, 'wasm');
    const answer = {page: await page.evaluate(send, task.elsewhere), worker: await page.workers()[0].evaluate(send, task.elsewhere)};
    answer.markup = await page.evaluate(async () => {
      const found = new Set();
      document.addEventListener('securitypolicyviolation', event => found.add(event.effectiveDirective));
      const script = document.createElement('script');
      script.textContent = 'window.ran = true';
      const box = document.createElement('div');
      box.innerHTML = '<img src="data:," onerror="window.ran = true"><p style="color: red">x</p>';
      document.body.append(script, box);
      await new Promise(resolve => setTimeout(resolve, 500));
      return {ran: window.ran ?? false, found: [...found]};
    });
    return answer;
  },

  /** LiteRT.js fails in the middle of an answer; the page is then loaded again, and asked again. */
  async broken(task) {
    const {page} = await open(task), [each] = task.texts;
    await load(page, 'wasm');
    const first = await write(page, each.text, each);
    await page.workers()[0].evaluate(() => { self.broken = true; });
    const failed = await write(page, each.text, each);
    const prompt = await page.inputValue('#prompt');
    await load(page, 'wasm');
    return {first, refused: failed, prompt, second: await write(page, each.text, each), divider: await page.textContent('.divider')};
  },

  /** Loads on wasm, takes WebGPU instead, comes back. */
  async switch(task) {
    const {page, problems} = await open(task), answer = {problems}, [each] = task.texts;
    const chart = () => page.textContent('#candidates');
    const loaded = accelerator => page.waitForFunction(accelerator => document.querySelector('#panel').dataset.accelerator === accelerator && !document.querySelector('#send').disabled, accelerator);
    await load(page, 'wasm');
    await unfold(page);
    await page.selectOption('#accelerator', 'webgpu');
    await loaded('webgpu');
    const before = await chart(); // what is learnt in use is for that visit
    answer.switched = {...await facts(page), ...await write(page, each.text, each)};
    await page.reload();
    await loaded('webgpu');
    answer.again = {...await facts(page), alike: before === await chart()};
    return answer;
  },

  /** Steps through a traced result by keys, at one width and in one colour scheme. */
  async inspect(task) {
    const {page, requests, problems} = await open(task), answer = {requests, problems, seen: []};
    page.on('console', message => problems.push(message.text()));
    await page.setViewportSize({width: task.width, height: 800});
    await page.emulateMedia({colorScheme: task.scheme});
    await page.reload();
    if (task.table) await page.click('#nodes summary');
    answer.ground = await page.evaluate(() => getComputedStyle(document.body).backgroundColor);
    answer.seen.push(await inspected(page));
    for (const act of task.acts ?? []) {
      if (act.key) await page.keyboard.press(act.key);
      if (act.click) await page.click(act.click);
      if (act.select) await page.selectOption(act.select, act.value);
      if (act.until) await page.waitForFunction(step => Number(document.querySelector('#step').value) === step, act.until);
      answer.seen.push({...await inspected(page), ...await page.evaluate(looks)});
      if (act.picture) await page.screenshot({path: act.picture, fullPage: act.full ?? false});
    }
    await page.evaluate(() => document.activeElement.blur());
    answer.reached = [];
    for (let press = 0; press < (task.tabs ?? 0); press++) {
      await page.keyboard.press('Tab');
      answer.reached.push(await page.evaluate(() => document.activeElement.id));
    }
    if (task.elsewhere) answer.refused = await page.evaluate(send, task.elsewhere);
    return answer;
  },

  /** Takes an example in the middle of a conversation. */
  async example(task) {
    const {page, problems} = await open(task);
    const shown = () => page.$$eval('#examples button', buttons => buttons.map(each => [each.textContent, each.disabled]));
    const answer = {problems, before: await page.waitForSelector('#examples button').then(shown)};
    await load(page, 'wasm');
    for (const each of task.texts) await write(page, each.text, each);
    await page.click(`#examples button:nth-of-type(${task.example})`);
    await page.waitForFunction(() => document.querySelectorAll('.turn.model').length === 1 && document.querySelector('.turn.model').dataset.reason);
    answer.after = await shown();
    answer.asked = await page.$$eval('.turn.person', lines => lines.map(line => line.textContent));
    answer.ids = await page.$eval('.turn.model', line => JSON.parse(line.dataset.ids));
    // The shares of each group of bars; then, on a narrow screen, the tree's own scroll bar and how far it goes.
    answer.widths = await page.evaluate(() => Object.fromEntries(['histogram', 'time', 'candidates'].map(id => [id, [...document.querySelectorAll(`#${id} .fill`)].map(fill => parseFloat(fill.style.width))])));
    await page.setViewportSize({width: 240, height: 800});
    answer.scrollBar = await page.$eval('#tree', box => box.offsetHeight - box.clientHeight);
    answer.scrolls = await page.$eval('#tree', box => box.scrollWidth - box.clientWidth);
    return answer;
  },

  /** Pictures of the page in use, wide and narrow, light and dark. */
  async pictures(task) {
    const {page} = await open(task);
    await load(page, task.accelerator ?? 'wasm');
    for (const each of task.texts) await write(page, each.text, each);
    for (const {path, width, height, scheme} of task.pictures) {
      await page.setViewportSize({width, height});
      await page.emulateMedia({colorScheme: scheme});
      await page.screenshot({path, fullPage: true});
    }
    return {};
  },
};

for await (const line of readline.createInterface({input: process.stdin})) {
  const task = JSON.parse(line);
  let answer;
  try {
    answer = await scenarios[task.scenario](task);
  } catch (error) {
    answer = {failed: String(error.stack ?? error)};
  }
  await Promise.all(browser.contexts().map(context => context.close()));
  console.log(JSON.stringify(answer));
}
await browser.close();
