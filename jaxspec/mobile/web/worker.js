// Runs the model outside the page, so that the page never freezes. A classic worker, as LiteRT.js
// loads its wasm by importScripts.

const base = self.location.href;
const wasm = new URL('vendor/litert/wasm/', base).href;
const TEXT = new TextDecoder();
const FRAME = 33; // milliseconds between messages to the page
const LISTEN = 50; // and between looks for messages from it

const post = (type, rest = {}, transfer = []) => self.postMessage({type, ...rest}, transfer);
const modules = Promise.all(
  ['./engine.js', './session.js', './storage.js', './tokenizer.js', './vendor/litert/index.js', './vendor/tokenizers/tokenizers.js', './vendor/hashes/sha2.js']
    .map(path => import(path)));
let session = null, profile = null, stopping = false, bytes = null;

/** Receives messages, such as "stop"; timers would wait for milliseconds. */
const channel = new MessageChannel();
let resume = null;
channel.port1.onmessage = () => resume();
const breathe = () => new Promise(resolve => {
  resume = resolve;
  channel.port2.postMessage(null);
});

self.onmessage = async ({data}) => {
  if (data.type === 'stop') {
    stopping = true;
    return;
  }
  try {
    await handlers[data.type](data);
  } catch (error) {
    const [{UserError}] = await modules.catch(() => [{UserError: Error}]);
    const known = error instanceof UserError;
    if (!known) console.error(error);
    // After an error of LiteRT.js its state is undefined.
    post('error', {fatal: !known || data.type === 'start', message: known ? error.message : `Something went wrong that should not: ${error?.message ?? error}.`});
  }
};

/** Lines that LiteRT's code writes to its standard error: only some of them are errors. */
function log(line) {
  if (/^(ERROR|FATAL|[EF]\d{4}) ?/.test(line) || /^(Aborted|Uncaught)/.test(line)) console.error(line);
  else console.debug(line);
}

/** Starts LiteRT.js; returns true with threads, which it refuses if wasm lacks relaxed SIMD. */
async function startLitert(litert, threads) {
  self.Module = {locateFile: name => wasm + name, mainScriptUrlOrBlob: `${wasm}litert_wasm_threaded_internal.js`, printErr: log};
  try {
    await litert.loadLiteRt(wasm, {threads});
    return threads;
  } catch (error) {
    if (threads) return startLitert(litert, false);
    const [{UserError}] = await modules;
    throw new UserError(`LiteRT.js could not be started: ${error?.message ?? error}. Check the connection, then try again.`);
  }
}

const handlers = {
  async start({profile: given, accelerator, threads, file, coderFile, times, handed}) {
    profile = given;
    let loaded;
    try {
      loaded = await modules;
    } catch (error) {
      post('error', {fatal: true, message: 'A part of the page could not be loaded: check the connection, then reload.'});
      return;
    }
    const [, {Session}, {fetchFile}, {TextCoder}, litert, {Tokenizer}, {sha256}] = loaded;
    post('progress', {part: 'download', done: 0, total: file.bytes});
    bytes = handed ?? null;
    let from = 'page', problem = null;
    if (!bytes) {
      ({bytes, from, problem} = await fetchFile(file, sha256, (done, total) => post('progress', {part: 'download', done, total})));
    }
    const {bytes: settings} = await fetchFile(coderFile, sha256, () => {});
    post('model', {from, problem});
    const coder = new TextCoder(Tokenizer, JSON.parse(TEXT.decode(settings)), profile.chat);
    post('progress', {part: 'runtime'});
    session = new Session(litert, profile, coder, accelerator);
    try {
      post('runtime', {threads: await startLitert(litert, threads)});
      post('progress', {part: 'compile'});
      await session.open(bytes);
    } catch (error) {
      if (accelerator !== 'webgpu') throw error;
      refuse(error?.message ?? String(error));
      return;
    }
    post('progress', {part: 'self-test'});
    let tested;
    try {
      tested = await session.selfTest();
    } catch (error) {
      console.error(error);
      tested = {ok: false, message: `The self-test broke off: ${error?.message ?? error}`};
    }
    if (!tested.ok && !tested.missing) {
      refuse(tested.message);
      return;
    }
    bytes = null;
    session.forget();
    post('tested', tested);
    if (accelerator === 'webgpu') {
      litert.getWebGpuDevice().lost.then(({message}) => post('error', {fatal: true, message: `The browser took the GPU away: ${message || 'it does not say why'}.`}));
    }
    if (times) {
      session.assume(times);
      ready();
    } else {
      await handlers.measure();
    }
  },

  async measure() {
    await session.measure(share => post('progress', {part: 'measure', done: share, total: 1}));
    ready();
  },

  async reply({text, mode, maxTokens, choice}) {
    stopping = false;
    const {coder, decoder} = session, growing = coder.stream();
    const stops = new Set(profile.stop_token_ids);
    const begin = performance.now();
    decoder.clock = {run: 0, read: 0};
    let pieces = [], ids = [], counts = [], view = null, last = begin, heard = begin, decoding = null, calls = 0, tokens = 0, decodeTime = 0, reason = null;
    const flush = () => {
      const {run, read} = decoder.clock;
      post('text', {
        pieces, ids, counts, tokens, calls, decodeTime, clock: {run, read},
        choice: view?.choice ?? null,
        view: view && {...view, names: view.drafted.map(id => coder.name(id))},
        speeds: session.chooser?.speeds(),
      });
      [pieces, ids, counts] = [[], [], []];
    };
    const report = (done, total) => {
      post('progress', {part: 'prompt', done, total});
      return breathe();
    };
    for await (const step of session.reply(text, {mode, maxTokens, choice, stopped: () => stopping, report})) {
      if (step.choice === null && decoding === null) {
        decoding = performance.now();
        decoder.clock = {run: 0, read: 0};
      }
      step.tokens.forEach((id, place) => {
        ids.push(id);
        const piece = stops.has(id) ? '' : growing.push(id);
        if (piece) pieces.push([piece, place < step.accepted]);
      });
      if (step.choice) {
        calls++;
        tokens += step.tokens.length;
        if (step.drafted.length) {
          counts.push(step.accepted);
          view = {choice: step.choice, drafted: step.drafted, path: step.path};
        } else {
          view = {choice: step.choice, drafted: [], path: []};
        }
      }
      reason = step.reason ?? reason;
      const now = performance.now();
      decodeTime = now - decoding;
      if (now - last >= FRAME) {
        flush();
        last = now;
      }
      if (now - heard >= LISTEN) {
        await breathe();
        heard = performance.now();
      }
    }
    flush();
    post('done', {reason, milliseconds: performance.now() - begin, room: decoder.room});
  },

  async forget() {
    session.forget();
    post('forgotten');
  },

  /** Times the kit: passes of several sizes, from which a tree can be searched for this device. */
  async kit({file}) {
    const [, {compile, timeKit}, {fetchFile}, , litert, , {sha256}] = await modules;
    const {bytes: kit} = await fetchFile(file, sha256, (done, total) => post('progress', {part: 'kit', done, total}));
    post('progress', {part: 'kit-measure', done: 0, total: 1});
    const model = await compile(litert, kit, session.accelerator);
    try {
      const seconds = await timeKit(model, litert.Tensor, profile.kit, share => post('progress', {part: 'kit-measure', done: share, total: 1}));
      post('kit', {seconds});
    } finally {
      model.delete();
    }
  },
};

function ready() {
  const {accelerator, chooser, times} = session;
  post('ready', {accelerator, times, expected: chooser.expected, speeds: chooser.speeds(), best: chooser.current});
}

/** Gives up an accelerator; the bytes go back, so that the next one is tried. */
function refuse(message) {
  const handed = bytes;
  bytes = null;
  post('refused', {message, handed}, handed ? [handed.buffer] : []);
}
