// Decoding with an exported file: prompts in parts, plain decoding, and steps over any of its
// trees. The same code runs in the page's worker and, for the tests, in Node.
//
// State passes from call to call as tensors: an output `o_NAME` is the next call's input NAME, and
// the tensor that it replaces is deleted at once, or the heap would grow by every cache in every
// step. Only a few integers of each call are read back.

export const PLAIN = 'decode';

/** A message for the user of the page. */
export class UserError extends Error {}

export class Decoder {
  /**
   * @param model a compiled model of LiteRT.js.
   * @param Tensor LiteRT.js's class.
   * @param profile contents of `profile.json`.
   * @param now a clock, in milliseconds.
   */
  constructor(model, Tensor, profile, now = () => performance.now()) {
    this.model = model;
    this.profile = profile;
    this.trees = new Map(profile.trees.map(tree => [tree.signature, tree]));
    this.rows = profile.depth + 1; // of what a step hands to the next one
    this.prefillSizes = profile.prefill;
    this.text = []; // ids; the last one is pending, the others are in the target's cache
    this.known = 0; // of which this many, and their successors, are in the head's cache too
    this.recent = 0; // tokens at the end that the head has yet to absorb; 0: it lacks more
    this.clock = {run: 0, read: 0};
    this._Tensor = Tensor;
    this._now = now;
    this._signatures = new Map();
    for (const [name, signature] of Object.entries(model.signatures)) {
      this._signatures.set(name, {
        signature,
        inputs: signature.getInputDetails().map(({name, dtype, shape}) => ({name, dtype, shape})),
      });
    }
    for (const name of [PLAIN, ...this.trees.keys(), ...this.prefillSizes.map(n => `prefill_${n}`)]) {
      if (!this._signatures.has(name)) {
        throw new UserError(`The model file has no function ${name}: it does not belong to this profile.json. Export both again.`);
      }
    }
    this.state = {};
    for (const {inputs} of this._signatures.values()) {
      for (const {name, dtype, shape} of inputs) {
        if (!(name in this.state) && /_[kv]_\d+$|^states$/.test(name)) this.state[name] = this._zeros(dtype, shape);
      }
    }
  }

  /** Deletes every tensor; the model stays. */
  delete() {
    for (const tensor of Object.values(this.state)) tensor.delete();
    this.state = {};
  }

  /** Tokens that fit behind the text. */
  get room() {
    return this.profile.capacity - this.text.length;
  }

  /** Returns true if a step over a tree still fits: it writes a whole padded path. */
  fits(choice) {
    const cached = this.text.length - 1;
    return cached + (choice === PLAIN ? 1 : this.rows) <= this.profile.capacity;
  }

  /**
   * Reads the part of a prompt that the caches do not hold yet, and appends the next token.
   * @param report awaited with the number of tokens read so far; `false` ends it.
   * @returns that token, or null if `report` ended it: then the text is unchanged.
   */
  async prefill(prompt, report = () => true) {
    const {capacity, num_tokens: known} = this.profile;
    if (!prompt.length) throw new UserError('There is nothing to continue: write something first.');
    if (prompt.length >= capacity) {
      throw new UserError(`This text has ${prompt.length} tokens, and the model was exported for texts below ${capacity}. Shorten it, or begin anew.`);
    }
    const odd = prompt.find(id => !(id >= 0 && id < known));
    if (odd !== undefined) throw new UserError(`The tokenizer gave the id ${odd}, which the model does not know (0 to ${known - 1}): its files do not belong together.`);
    let same = 0;
    while (same < prompt.length && prompt[same] === this.text[same]) same++;
    // A head's pair joins a state with the token after it, so that token must be the same too.
    const start = Math.max(0, Math.min(this.known, same - 1, prompt.length - 1));
    const before = this.text;
    this.text = [];
    this.known = 0;
    const next = await this._read(prompt, start, report);
    if (next === null) {
      Object.assign(this, {text: before, known: start, recent: 0});
      return null;
    }
    this.text = [...prompt, next];
    this.known = prompt.length - 1;
    this.recent = 1;
    return next;
  }

  /**
   * Emits tokens: one with PLAIN, up to a tree's depth + 1 with the signature of a tree.
   * @returns {tokens, drafted, path}: the tokens, the tree's drafted
   *     tokens (the pending one first; none with PLAIN), and the accepted nodes, the root included.
   */
  async advance(choice) {
    if (!this.fits(choice)) throw new UserError('The text is as long as the model was exported for: begin anew.');
    return choice === PLAIN ? this._decode() : this._step(choice);
  }

  /**
   * Returns the milliseconds of one call, results read; the state stays as it is.
   */
  async time(choice) {
    if (choice !== PLAIN) await this._catchUp();
    this._uploadPending(choice !== PLAIN);
    const begin = this._now();
    const outputs = await this._call(choice);
    await outputs[choice === PLAIN ? 'o_pending' : 'report'].data();
    const passed = this._now() - begin;
    drop(outputs);
    return passed;
  }

  async _decode() {
    this._uploadPending(false);
    const outputs = await this._call(PLAIN);
    const begin = this._now();
    const [token] = await outputs.o_pending.data();
    this.clock.read += this._now() - begin;
    this._keep(outputs);
    this.text.push(token);
    this.recent = 0; // the head's cache does not follow
    return {tokens: [token], drafted: [], path: [], accepted: 0};
  }

  async _step(name) {
    const tree = this.trees.get(name);
    await this._catchUp();
    this._uploadPending(true);
    const cached = this.text.length - 1;
    const outputs = await this._call(name);
    const begin = this._now();
    const report = await outputs.report.data();
    this.clock.read += this._now() - begin;
    this._keep(outputs);
    const count = report[0];
    const tokens = Array.from(report.subarray(1, 1 + count));
    const drafted = Array.from(report.subarray(1 + this.rows));
    for (const token of tokens) this.text.push(token);
    this.known = cached;
    this.recent = count;
    return {tokens, drafted, path: acceptedPath(tree.parents, drafted, tokens), accepted: count - 1};
  }

  /** Lets the head read the tokens of plain decoding since it last drafted. */
  async _catchUp() {
    if (this.recent) return;
    const text = this.text;
    await this._read(text.slice(0, -1), Math.min(this.known, text.length - 2), () => true);
    this.known = text.length - 2;
    this.recent = 1;
    this._forget('tokens', 'count', 'length', 'pending');
  }

  async _read(prompt, start, report) {
    const {capacity} = this.profile, sizes = this.prefillSizes, length = prompt.length;
    this._forget('tokens', 'count', 'length', 'pending');
    let at = start, next = 0;
    while (at < length) {
      const size = sizes.find(n => n >= length - at) ?? sizes.at(-1);
      // The last part may overlap what is cached: reading a token again changes nothing.
      at = Math.max(0, Math.min(at, capacity - size));
      const count = Math.min(size, length - at), part = new Int32Array(size);
      part.set(prompt.slice(at, at + count));
      const following = at + count < length ? prompt[at + count] : 0;
      this._set('prompt', part, [1, size]);
      this._set('count', [count]);
      this._set('length', [at]);
      this._set('following', [following]);
      const outputs = await this._call(`prefill_${size}`);
      at += count;
      if (at >= length) [next] = await outputs.o_pending.data();
      this._keep(outputs);
      if (await report(at) === false && at < length) {
        next = null;
        break;
      }
    }
    this._forget('prompt', 'following', 'tokens', 'count', 'length', 'pending');
    return next;
  }

  /** Sets the inputs that the last call did not write. */
  _uploadPending(forTree) {
    const {text, state} = this;
    if (!('length' in state)) this._set('length', [text.length - 1]);
    if (!('pending' in state)) this._set('pending', [text.at(-1)]);
    if (!forTree || ('tokens' in state && 'count' in state)) return;
    const tokens = new Int32Array(this.rows);
    tokens.set(text.slice(text.length - this.recent));
    this._set('tokens', tokens, [1, this.rows]);
    this._set('count', [this.recent]);
  }

  async _call(name) {
    const {signature, inputs} = this._signatures.get(name), {state} = this;
    const given = {};
    for (const {name} of inputs) given[name] = state[name];
    const begin = this._now();
    const outputs = await signature.run(given);
    this.clock.run += this._now() - begin;
    return outputs;
  }

  /** Makes outputs the state; deletes replaced state and all other outputs. */
  _keep(outputs) {
    const {state} = this;
    for (const name in outputs) {
      if (name.startsWith('o_')) {
        const kept = name.slice(2);
        state[kept]?.delete();
        state[kept] = outputs[name];
      } else {
        outputs[name].delete();
      }
    }
    // `decode` leaves these unchanged.
    if (!('o_tokens' in outputs)) this._forget('tokens', 'count');
  }

  _set(name, values, shape = [1]) {
    this.state[name]?.delete();
    this.state[name] = new this._Tensor(Int32Array.from(values), shape);
  }

  _forget(...names) {
    for (const name of names) {
      this.state[name]?.delete();
      delete this.state[name];
    }
  }

  _zeros(dtype, shape) {
    const size = shape.reduce((product, side) => product * side, 1);
    const data = dtype === 'int32' ? new Int32Array(size) : new Float32Array(size);
    return new this._Tensor(data, Array.from(shape));
  }
}

/** Returns the nodes of the emitted tokens except the last, from the root down. */
export function acceptedPath(parents, drafted, tokens) {
  const path = [0];
  for (const token of tokens.slice(0, -1)) {
    const node = parents.findIndex((parent, node) => parent === path.at(-1) && drafted[node] === token);
    if (node < 0) break;
    path.push(node);
  }
  return path;
}

/**
 * Decodes until a stop id, the budget or the end of the room.
 * @param decoder holds the text after a prefill; its last token is yielded first.
 * @param options {maxTokens, stops, choose, stopped}: `choose()` names what to call next,
 *     `stopped()` ends it.
 * @yields {tokens, drafted, path, accepted, choice, seconds, reason}: `reason` is set at the end:
 *     "stop", "length", "room" or "stopped".
 */
export async function* generate(decoder, {maxTokens, stops, choose, stopped = () => false}) {
  const ends = new Set(stops);
  let left = Math.min(maxTokens, decoder.room + 1);
  const budget = left < maxTokens ? 'room' : 'length';
  const cut = tokens => {
    const end = tokens.findIndex(token => ends.has(token));
    const kept = end >= 0 && end < left ? tokens.slice(0, end + 1) : tokens.slice(0, left);
    left -= kept.length;
    const reason = end >= 0 && kept.length === end + 1 ? 'stop' : left <= 0 ? budget : null;
    decoder.text.length -= tokens.length - kept.length;
    if (kept.length < tokens.length) decoder.recent = 0;
    return {kept, reason};
  };
  if (left <= 0) return;
  const first = cut([decoder.text.at(-1)]);
  yield {tokens: first.kept, drafted: [], path: [], accepted: 0, choice: null, milliseconds: 0, reason: first.reason};
  if (first.reason) return;
  while (true) {
    if (stopped()) {
      yield {tokens: [], drafted: [], path: [], accepted: 0, choice: null, milliseconds: 0, reason: 'stopped'};
      return;
    }
    let choice = choose();
    if (!decoder.fits(choice)) choice = PLAIN;
    const begin = decoder._now();
    const step = await decoder.advance(choice);
    const milliseconds = decoder._now() - begin;
    const {kept, reason} = cut(step.tokens);
    yield {...step, tokens: kept, accepted: Math.min(step.accepted, kept.length), choice, milliseconds, reason};
    if (reason) return;
  }
}

/**
 * Runs the stored steps and compares. More than one run: some drivers are right only once.
 * @returns {ok, message, runs}
 */
export async function selfTest(decoder, test, runs = 2) {
  if (!test || !test.prompt?.length || !test.steps) {
    return {ok: false, missing: true, message: 'This export has no self-test, so nothing can be said about whether this device computes rightly.'};
  }
  for (let run = 0; run < runs; run++) {
    for (const [signature, expected] of Object.entries(test.steps)) {
      decoder.text = []; // read anew
      decoder.known = 0;
      const got = [await decoder.prefill(test.prompt)];
      let whole = false;
      for (let step = 0; step < test.num_steps; step++) {
        const {tokens} = await decoder.advance(signature);
        got.push(...tokens);
        const tree = decoder.trees.get(signature);
        if (tree && tokens.length === tree.depth + 1) whole = true;
      }
      const differs = got.findIndex((token, place) => place < expected.length && token !== expected[place]);
      if (differs >= 0) {
        return {ok: false, message: `The self-test failed: run ${run + 1} of ${signature} gave token ${got[differs]} in place ${differs}, and ${expected[differs]} is right.`};
      }
      if (signature !== PLAIN && !whole) {
        return {ok: false, message: `The self-test failed: no step of ${signature} accepted its whole path, and one should.`};
      }
    }
  }
  return {ok: true, message: `The self-test passed: ${runs} runs of ${Object.keys(test.steps).length} functions.`};
}

export function drop(tensors) {
  for (const tensor of Object.values(tensors)) tensor.delete();
}
