// Choice of the function to decode with: its time on this device over its expected tokens.

import {PLAIN} from './engine.js';

const WARM_UP = 30; // rounds; before, compilers of the browser are still at work
const ROUNDS = 15;
const BATCH_MILLISECONDS = 4; // a browser's clock may tick every 0.1 ms, or every 1 ms
const BUDGET = {warmUp: 3000, rounds: 5000}; // milliseconds, on slow devices
const FEWEST = 3;
const TIME_WEIGHT = 0.05; // of a new step in a running mean
const COUNT_WEIGHT = 0.02;
const STEPS_BETWEEN = 64; // choices
const GAIN = 1.05; // by which another has to be faster

/**
 * Times functions in turns.
 * @param time returns the milliseconds of one call of a function.
 * @param choices their names.
 * @param report called with the finished share.
 * @returns {name: {median, spread}}, in milliseconds; spread is half the distance of the quartiles.
 */
export async function measure(time, choices, report = () => {}, now = () => performance.now()) {
  const calls = Object.fromEntries(choices.map(name => [name, 1]));
  const rounds = async (most, milliseconds, onRound, onShare) => {
    const begin = now();
    for (let round = 0; round < most; round++) {
      const passed = now() - begin;
      if (round >= FEWEST && passed > milliseconds) break;
      for (const name of choices) {
        let sum = 0;
        for (let call = 0; call < calls[name]; call++) sum += await time(name);
        onRound(name, sum / calls[name]);
      }
      await onShare(Math.max(round / most, Math.min(1, passed / milliseconds)));
    }
  };
  const last = {};
  await rounds(WARM_UP, BUDGET.warmUp, (name, milliseconds) => { last[name] = milliseconds; }, share => report(0.4 * share));
  for (const name of choices) calls[name] = Math.max(1, Math.ceil(BATCH_MILLISECONDS / Math.max(last[name], 0.01)));
  const runs = Object.fromEntries(choices.map(name => [name, []]));
  await rounds(ROUNDS, BUDGET.rounds, (name, milliseconds) => runs[name].push(milliseconds), share => report(0.4 + 0.6 * share));
  await report(1);
  return Object.fromEntries(choices.map(name => {
    const sorted = runs[name].sort((a, b) => a - b);
    return [name, {median: quantile(sorted, 0.5), spread: (quantile(sorted, 0.75) - quantile(sorted, 0.25)) / 2}];
  }));
}

export function quantile(sorted, share) {
  const place = share * (sorted.length - 1), low = Math.floor(place);
  return sorted[low] + (place - low) * ((sorted[low + 1] ?? sorted[low]) - sorted[low]);
}

/** Expected tokens a call (the bonus included), times, and the choice between them. */
export class Chooser {
  /**
   * @param trees of the profile: {signature, tokens_per_step}.
   * @param times {name: {median}} of `measure`.
   */
  constructor(trees, times) {
    this.expected = {[PLAIN]: 1};
    for (const tree of trees) this.expected[tree.signature] = tree.tokens_per_step;
    this.measured = Object.fromEntries(Object.entries(times).map(([name, {median}]) => [name, median]));
    this._slowness = 1; // against what was measured: throttling slows everything down alike
    this.begin();
  }

  /** Starts a text: forgets the acceptance of the last one and keeps the times. */
  begin() {
    this._acceptance = 1; // of what is beyond the one token that every call gives
    this._steps = 0;
    this.current = this._best();
  }

  /** Returns the tokens per second of every candidate, as known so far. */
  speeds() {
    return Object.fromEntries(Object.keys(this.expected).map(name => {
      const tokens = 1 + (this.expected[name] - 1) * this._acceptance;
      return [name, 1000 * tokens / (this.measured[name] * this._slowness)];
    }));
  }

  /** Records a step, and sometimes chooses again. */
  observe(name, tokens, milliseconds) {
    this._slowness += TIME_WEIGHT * (Math.min(10, milliseconds / this.measured[name]) - this._slowness);
    if (name !== PLAIN && this.expected[name] > 1) {
      this._acceptance += COUNT_WEIGHT * ((tokens - 1) / (this.expected[name] - 1) - this._acceptance);
    }
    if (++this._steps % STEPS_BETWEEN) return;
    const speeds = this.speeds(), best = this._best(speeds);
    if (speeds[best] > GAIN * speeds[this.current]) this.current = best;
  }

  _best(speeds = this.speeds()) {
    return Object.keys(speeds).reduce((best, name) => (speeds[name] > speeds[best] ? name : best), PLAIN);
  }
}
