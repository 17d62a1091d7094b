// Whether the heap stays as it is over many steps. Usage: node --expose-gc heap.mjs PAGE [STEPS]
import {openSession} from './session_node.mjs';

const memories = [];
const {instantiate} = WebAssembly;
WebAssembly.instantiate = async (...given) => {
  const made = await instantiate(...given);
  for (const each of Object.values((made.instance ?? made).exports)) if (each instanceof WebAssembly.Memory) memories.push(each);
  return made;
};
const [folder, steps = '500'] = process.argv.slice(2);
const session = await openSession(folder);
const text = 'one two three';

async function run(count) {
  let left = count;
  while (left > 0) {
    for (const choice of session.choices) {
      session.forget();
      for await (const step of session.reply(text, {mode: 'text', maxTokens: 100000, choice, stopped: () => left <= 0})) if (step.choice) left--;
    }
  }
  globalThis.gc?.();
  return {wasm: memories.reduce((sum, {buffer}) => sum + buffer.byteLength, 0), javascript: process.memoryUsage().heapUsed};
}

const before = await run(100), after = await run(Number(steps));
console.log(JSON.stringify({before, after, growth: after.wasm / before.wasm - 1}));
