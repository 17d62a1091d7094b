// LiteRT.js in plain Node: its loader looks for a worker's globals.
import fs from 'node:fs';
import {createRequire} from 'node:module';
import path from 'node:path';
import {pathToFileURL} from 'node:url';
import vm from 'node:vm';

/** Loads LiteRT.js from the `vendor` folder of a page, one thread. */
export async function loadLitert(vendor) {
  const wasm = path.resolve(vendor, 'litert/wasm');
  globalThis.self = globalThis;
  globalThis.require = createRequire(import.meta.url);
  globalThis.__dirname = wasm;
  globalThis.__filename = path.join(wasm, 'litert_wasm_compat_internal.js');
  globalThis.GPUBuffer ??= class {};
  globalThis.importScripts = file => vm.runInThisContext(fs.readFileSync(file, 'utf8'), {filename: file});
  const build = process.env.LITERT_BUILD ?? 'litert_wasm_compat_internal';
  globalThis.Module = {
    locateFile: file => path.join(wasm, file),
    wasmBinary: fs.readFileSync(path.join(wasm, `${build}.wasm`)),
  };
  const litert = await import(pathToFileURL(path.resolve(vendor, 'litert/index.js')));
  await litert.loadLiteRt(path.join(wasm, `${build}.js`));
  return litert;
}
