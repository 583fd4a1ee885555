// Calls of the API, and what its messages are made of: bytes are base64, 64-bit numbers are strings, durations end with "s".

export class ApiError extends Error {
  constructor(status, body) {
    super(body.message || `HTTP ${status}`);
    this.status = status;
    this.code = body.code || '';
    this.reason = body.reason || '';
  }
}

async function request(path, method, body) {
  let answer;
  try {
    answer = await fetch('api/' + path, {
      method, body, cache: 'no-store', credentials: 'same-origin', headers: { 'X-Epochkv-Console': '1' },
    });
  } catch {
    throw new ApiError(0, { code: 'Unavailable', message: 'the server does not answer' });
  }
  const text = await answer.text();
  let parsed = {};
  try { parsed = JSON.parse(text); } catch { parsed = { message: text }; }
  if (!answer.ok) throw new ApiError(answer.status, parsed);
  return parsed;
}

export const call = (method, message = {}) => request('call/epochkv.v1.' + method, 'POST', JSON.stringify(message));
export const samples = () => request('samples', 'GET');
export const about = () => request('about', 'GET');
export const login = (who) => request('login', 'POST', JSON.stringify(who));
export const logout = () => request('logout', 'POST', '{}');

// scan collects the pages of a scan.
export async function scan(message) {
  const { messages } = await call('KVService/Scan', message);
  return { entries: messages.flatMap((m) => m.entries), epoch: messages.length ? messages[0].readEpoch : '0' };
}

export const toBase64 = (bytes) => btoa(Array.from(bytes, (b) => String.fromCharCode(b)).join(''));
export const fromBase64 = (text) => Uint8Array.from(atob(text || ''), (c) => c.charCodeAt(0));

// encodeKey makes bytes of what a person types: text, or \xHH for a byte.
export function encodeKey(text) {
  const out = [];
  for (const part of text.split(/(\\x[0-9a-fA-F]{2})/)) {
    if (/^\\x[0-9a-fA-F]{2}$/.test(part)) out.push(parseInt(part.slice(2), 16));
    else out.push(...new TextEncoder().encode(part));
  }
  return toBase64(Uint8Array.from(out));
}

// showBytes makes text of bytes: as it is if it is printable UTF-8, else with \xHH for each byte that is not printable ASCII.
export function showBytes(base64) {
  const bytes = fromBase64(base64);
  try {
    const text = new TextDecoder('utf-8', { fatal: true }).decode(bytes);
    if (!/[\p{Cc}\p{Co}\p{Cn}]/u.test(text.replace(/[\n\t]/g, ''))) return text;
  } catch { /* not UTF-8 */ }
  return Array.from(bytes, (b) => (b >= 32 && b < 127 ? String.fromCharCode(b) : '\\x' + b.toString(16).padStart(2, '0'))).join('');
}

export const seconds = (duration) => (duration ? parseFloat(duration) : 0);
