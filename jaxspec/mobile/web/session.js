// A model in use: compiled, tested, measured, answering. Its caller, a worker or a test in Node,
// passes LiteRT.js and a tokenizer, and shows the output.

import {Chooser, measure} from './choose.js';
import {Decoder, PLAIN, UserError, drop, generate, selfTest} from './engine.js';

const GPU_OPTIONS = {precision: 'fp32'}; // half precision was never tried

export class Session {
  /**
   * @param litert LiteRT.js: {loadAndCompile, Tensor}.
   * @param profile contents of profile.json.
   * @param coder a `TextCoder`.
   * @param accelerator "webgpu" or "wasm"; one for all of a session, as int8 differs between them.
   */
  constructor(litert, profile, coder, accelerator) {
    Object.assign(this, {litert, profile, coder, accelerator});
    this.choices = [PLAIN, ...profile.trees.map(tree => tree.signature)];
    this.chooser = null;
    this.times = null;
  }

  /** Compiles the model's bytes. */
  async open(bytes) {
    this.model = await compile(this.litert, bytes, this.accelerator);
    this.decoder = new Decoder(this.model, this.litert.Tensor, this.profile);
  }

  close() {
    this.decoder?.delete();
    this.model?.delete();
  }

  selfTest() {
    return selfTest(this.decoder, this.profile.self_test);
  }

  /** Times every function, and chooses. */
  async measure(report) {
    const {decoder} = this, before = decoder.text;
    this.forget();
    await decoder.prefill(this.profile.self_test?.prompt ?? [0]);
    this.times = await measure(choice => decoder.time(choice), this.choices, report);
    Object.assign(decoder, {text: before, known: 0}); // the conversation continues, and is read again
    this.assume(this.times);
    return this.times;
  }

  /** Chooses by times of an earlier visit. */
  assume(times) {
    this.times = times;
    this.chooser = new Chooser(this.profile.trees, times);
  }

  /** Forgets the conversation. */
  forget() {
    this.decoder.text = [];
    this.decoder.known = 0;
  }

  /** Returns the ids to read for the next answer: the text so far, then the new part. */
  prompt(text, mode) {
    const {coder, decoder: {text: before}} = this, {chat} = coder;
    if (mode !== 'chat' || !chat) return [...before, ...coder.encode(text, !before.length)];
    if (!before.length) return coder.encode(chat.open + text + chat.reply, false);
    const next = coder.encode(chat.turn + text + chat.reply, false);
    // The model may have ended its answer with the token that the template puts there.
    return [...before, ...(next[0] === before.at(-1) ? next.slice(1) : next)];
  }

  /**
   * Answers.
   * @param text of the user.
   * @param options {mode: "chat" or "text", maxTokens, choice: "auto" or a function's name,
   *     stopped, report}: `report` is awaited with the tokens read, and those to be read.
   * @yields as `generate`; once, with the reason "unread", if it was stopped before the text was
   *     read: the conversation is unchanged.
   */
  async *reply(text, {mode = 'chat', maxTokens = 256, choice = 'auto', stopped, report} = {}) {
    const {decoder, chooser} = this;
    const prompt = this.prompt(text, mode);
    const next = await decoder.prefill(prompt, async at => {
      await report?.(at, prompt.length);
      return !stopped?.();
    });
    if (next === null) {
      yield {tokens: [], drafted: [], path: [], accepted: 0, choice: null, milliseconds: 0, reason: 'unread'};
      return;
    }
    chooser?.begin();
    const choose = choice === 'auto' && chooser ? () => chooser.current : () => (choice === 'auto' ? PLAIN : choice);
    for await (const step of generate(decoder, {maxTokens, stops: this.profile.stop_token_ids, choose, stopped})) {
      if (step.choice) chooser?.observe(step.choice, step.accepted + 1, step.milliseconds);
      yield step;
    }
  }
}

/** A file's bytes, compiled, all of it for one accelerator. */
export async function compile(litert, bytes, accelerator) {
  let model;
  try {
    model = await litert.loadAndCompile(bytes, {accelerator, gpuOptions: GPU_OPTIONS});
  } catch (error) {
    throw new UserError(`The model's file could not be compiled for ${accelerator}: ${error.message ?? error}`);
  }
  // LiteRT.js silently runs a part on the CPU, where int8 gives other tokens.
  if (accelerator === 'webgpu' && !(model.options?.accelerator === 'webgpu' && model.isFullyAccelerated)) {
    model.delete();
    throw new UserError('This GPU cannot take the whole model.');
  }
  return model;
}

/**
 * Times each function of a kit.
 * @param model the kit, compiled.
 * @param kit of the profile: integers to fill in, by function and input.
 * @returns {name: [seconds, spread]}.
 */
export async function timeKit(model, Tensor, kit, report, now = () => performance.now()) {
  const inputs = {};
  for (const [name, integers] of Object.entries(kit.signatures)) {
    inputs[name] = Object.fromEntries(model.signatures[name].getInputDetails().map(details => {
      const size = details.shape.reduce((product, side) => product * side, 1);
      const data = details.dtype === 'int32' ? new Int32Array(size).fill(integers[details.name]) : new Float32Array(size);
      return [details.name, new Tensor(data, Array.from(details.shape))];
    }));
  }
  const time = async name => {
    const begin = now();
    const outputs = await model.signatures[name].run(inputs[name]);
    // Reading the smallest output waits for the call, on a GPU too.
    const smallest = Object.values(outputs).reduce((a, b) => (size(b) < size(a) ? b : a));
    await smallest.data();
    const passed = now() - begin;
    drop(outputs);
    return passed;
  };
  const times = await measure(time, Object.keys(kit.signatures), report, now);
  Object.values(inputs).forEach(drop);
  return Object.fromEntries(Object.entries(times).map(([name, {median, spread}]) => [name, [median / 1000, spread / 1000]]));
}

const size = tensor => tensor.type.layout.dimensions.reduce((product, side) => product * side, 1);
