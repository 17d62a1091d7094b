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
const browser = await chromium.launch({executablePath: process.env.CHROMIUM, args: FLAGS});

async function open(task) {
  const context = await browser.newContext({viewport: {width: 420, height: 900}, acceptDownloads: true});
  const requests = [], problems = [];
  context.on('request', request => requests.push([request.method(), request.url()]));
  const page = await context.newPage();
  page.setDefaultTimeout(LONG);
  page.on('pageerror', error => problems.push(error.message));
  if (task.quota) {
    const devtools = await context.newCDPSession(page);
    await devtools.send('Storage.overrideQuotaForOrigin', {origin: new URL(task.url).origin, quotaSize: task.quota});
  }
  if (task.noWebGpu) await context.addInitScript(() => Object.defineProperty(Navigator.prototype, 'gpu', {get: () => undefined}));
  await page.goto(task.url);
  return {context, page, requests, problems};
}

const settled = page => page.waitForFunction(() => !document.querySelector('#send').disabled || document.querySelector('.notice.bad'));
const notices = page => page.$$eval('.notice', lines => lines.map(line => line.textContent));

async function load(page, accelerator) {
  await page.waitForFunction(() => !document.querySelector('#load').disabled || document.querySelector('.notice.bad'));
  if (await page.isDisabled('#load')) return;
  await page.selectOption('#accelerator', accelerator);
  await page.focus('#load');
  await page.keyboard.press('Enter');
  await settled(page);
}

async function write(page, text, {choice = 'auto', mode = 'text', tokens = 64, stopAfter = null} = {}) {
  await page.selectOption('#choice', choice);
  await page.selectOption('#mode', mode);
  await page.fill('#tokens', String(tokens));
  await page.fill('#prompt', ''); // a refused text stands there again
  await page.focus('#prompt');
  await page.keyboard.insertText(text);
  const before = (await page.$$('.turn.model')).length;
  await page.keyboard.press('Enter');
  if (stopAfter !== null) {
    await page.waitForFunction(([before, length]) => (document.querySelectorAll('.turn.model')[before]?.textContent.length ?? 0) > length, [before, stopAfter]);
    await page.keyboard.press('Escape');
  }
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
    const {page, requests, problems} = await open(task), answer = {requests, problems};
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
    await page.click('#delete');
    await page.waitForSelector('#delete', {state: 'hidden'});
    answer.deleted = (await facts(page)).model;
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
