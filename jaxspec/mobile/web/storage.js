// Files of the model, from the browser's storage or else from the server, and small facts that the
// page remembers. Other pages of the same server keep theirs.

import {UserError} from './engine.js';

const CACHE = 'jaxspec-models';

const folder = new URL('stored/', self.location.href).href;
const place = ({sha256}) => `${folder}${sha256}`;

function storage() {
  try {
    // Browsers keep it from pages that are not secure, such as http: from another machine.
    return self.caches ?? null;
  } catch {
    return null; // switched off
  }
}

/** Deletes the stored files of this page except those that are named. */
async function sweep(cache, kept = []) {
  const current = new Set(kept.map(sha256 => place({sha256})));
  const old = (await cache.keys()).filter(({url}) => url.startsWith(folder) && !current.has(url));
  await Promise.all(old.map(request => cache.delete(request)));
}

/** Bytes kept of a file, or 0. */
export async function storedBytes(file) {
  try {
    const found = await (await storage()?.open(CACHE))?.match(place(file));
    return found ? Number(found.headers.get('Content-Length')) : 0;
  } catch {
    return 0;
  }
}

/** Removes all files and facts of this page. */
export async function deleteStored() {
  const cache = await storage()?.open(CACHE);
  if (cache) await sweep(cache);
  try {
    localStorage.removeItem(folder);
  } catch {
    // Denied: nothing was kept.
  }
}

/** Returns the fact that `remember` kept under a name, or null. */
export function recall(name) {
  return facts()[name] ?? null;
}

/** Keeps a fact if the browser allows it. */
export function remember(name, fact) {
  try {
    localStorage.setItem(folder, JSON.stringify({...facts(), [name]: fact}));
  } catch {
    // Denied or full: it is measured again at the next visit.
  }
}

function facts() {
  try {
    return JSON.parse(localStorage.getItem(folder)) ?? {};
  } catch {
    return {};
  }
}

/**
 * A file's bytes, checked.
 * @param file {name, url, bytes, sha256, current}: `current` are the checksums of all of this export's
 *     files; stored files with other checksums are deleted.
 * @param sha256 the hash's constructor: `create()`, `update`, `digest`.
 * @param report called with (bytes so far, bytes in all).
 * @returns {bytes, from, problem}: from "storage" or "network"; problem: why it could not be kept.
 */
export async function fetchFile(file, sha256, report) {
  const kept = await fromStorage(file, sha256);
  if (kept) return {bytes: kept, from: 'storage', problem: null};
  const bytes = await download(file, report);
  if (digest(bytes, sha256) !== file.sha256) {
    throw new UserError(`${file.name} arrived damaged, or is not the file that belongs to this page (its checksum differs). Try again; if that does not help, export the page anew.`);
  }
  return {bytes, from: 'network', problem: await keep(file, bytes)};
}

async function fromStorage(file, sha256) {
  try {
    const cache = await storage()?.open(CACHE);
    const found = await cache?.match(place(file));
    if (!found) return null;
    const bytes = new Uint8Array(await found.arrayBuffer());
    if (bytes.length === file.bytes && digest(bytes, sha256) === file.sha256) return bytes;
    await cache.delete(place(file));
  } catch {
    // Denied or broken: the server still has it.
  }
  return null;
}

async function download(file, report) {
  const failed = reason => new UserError(`${file.name} could not be downloaded: ${reason}. Check the connection to the server, then try again.`);
  let response;
  try {
    response = await fetch(file.url, {cache: 'no-store'});
  } catch {
    throw failed('the server does not answer');
  }
  if (!response.ok) throw failed(`the server answered ${response.status} ${response.statusText}`);
  const bytes = room(file), reader = response.body.getReader();
  let at = 0;
  while (true) {
    let part;
    try {
      part = await reader.read();
    } catch {
      throw failed(`the connection broke off after ${megabytes(at)} of ${megabytes(file.bytes)}`);
    }
    if (part.done) break;
    if (at + part.value.length > bytes.length) throw failed('it is longer than it should be, so it belongs to another export');
    bytes.set(part.value, at);
    at += part.value.length;
    report(at, bytes.length);
  }
  if (at < bytes.length) throw failed(`it ended after ${megabytes(at)} of ${megabytes(file.bytes)}`);
  return bytes;
}

function room({name, bytes}) {
  try {
    return new Uint8Array(bytes);
  } catch {
    throw new UserError(`${name} needs ${megabytes(bytes)} of memory, which this device does not have free: close other pages, then try again.`);
  }
}

/** Stores a file; returns the reason if that fails. */
async function keep(file, bytes) {
  const again = 'it will be downloaded again the next time';
  if (!storage()) return `The browser gives this page no storage (the address is not secure, or storage is switched off): ${again}.`;
  try {
    const cache = await storage().open(CACHE);
    await sweep(cache, file.current);
    await cache.put(place(file), new Response(bytes, {headers: {'Content-Length': String(bytes.length)}}));
    return null;
  } catch (error) {
    const full = error?.name === 'QuotaExceededError';
    return full ? `The browser's storage is full (${megabytes(bytes.length)} are needed): ${again}.` : `The browser denies this page storage: ${again}.`;
  }
}

export function megabytes(bytes) {
  return `${(bytes / 1e6).toFixed(bytes < 1e7 ? 1 : 0)} MB`;
}

function digest(bytes, sha256) {
  const hash = sha256.create(), step = 1 << 22;
  for (let at = 0; at < bytes.length; at += step) hash.update(bytes.subarray(at, at + step));
  return Array.from(hash.digest(), byte => byte.toString(16).padStart(2, '0')).join('');
}
