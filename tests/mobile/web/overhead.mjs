// What the page's loop adds to bare calls of LiteRT.js, and tokens per second of every function.
// Usage: node overhead.mjs PAGE [ROUNDS]
// Per step: everything from the choice of a function to the text of its tokens, over the time
// inside LiteRT.js's `run`; medians. One thread; LITERT_BUILD=litert_wasm_internal and
// node --experimental-wasm-relaxed-simd take the build that browsers take without threads.
import {median, openSession, round} from './session_node.mjs';

const [folder, rounds = '3'] = process.argv.slice(2);
const PROMPT = 'Question: Tom has 5 boxes with 9 pens in each box. How many pens does Tom have now?\nAnswer:';
const known = (session, text) => [...text].filter(each => {
  try { return session.coder.encode(each, false).length; } catch { return false; }
}).join('');

const session = await openSession(folder), {decoder, coder} = session;
const text = known(session, PROMPT);
const most = Math.min(128, session.profile.capacity - 64), found = {};
for (let round = 0; round <= Number(rounds); round++) {
  for (const choice of session.choices) {
    session.forget();
    const growing = coder.stream(), overheads = [];
    let tokens = 0, milliseconds = 0, shown = '', ran = 0, begin = null;
    for await (const step of session.reply(text, {mode: 'text', maxTokens: most, choice})) {
      for (const id of step.tokens) shown += growing.push(id);
      const now = performance.now();
      if (begin !== null) {
        const bare = decoder.clock.run - ran;
        overheads.push((now - begin) / bare - 1);
        tokens += step.tokens.length;
        milliseconds += now - begin;
      }
      ran = decoder.clock.run;
      begin = performance.now();
    }
    if (round === 0) continue; // compilers of JavaScript are at work
    (found[choice] ??= []).push({overhead: median(overheads), speed: 1000 * tokens / milliseconds, shown: shown.length});
  }
}
const summary = Object.fromEntries(Object.entries(found).map(([choice, runs]) => [choice, {
  overhead: round(median(runs.map(({overhead}) => overhead)), 4),
  tokensPerSecond: round(median(runs.map(({speed}) => speed)), 1),
}]));
console.log(JSON.stringify(summary));
