// Counts to COUNT (1000) at ENDPOINT, and checks that each increment was executed exactly once, whatever
// happens to the server and to its answers meanwhile. See docs/exactly-once.md; `make test-clients` kills
// the server under it. TLS_DIR is a directory that kvctl tls init has made; without it the connection is plain text.
'use strict';

const crypto = require('node:crypto');
const fs = require('node:fs');
const path = require('node:path');
const grpc = require('@grpc/grpc-js');
const loader = require('@grpc/proto-loader');

const api = path.join(__dirname, '../../api');
const { epochkv } = grpc.loadPackageDefinition(loader.loadSync(
  ['epochkv/v1/kv.proto', 'epochkv/v1/transactions.proto'],
  { includeDirs: [`${api}/proto`, `${api}/third_party`], keepCase: true, longs: Number, enums: String, defaults: true, oneofs: true },
));
const read = (name) => fs.readFileSync(path.join(process.env.TLS_DIR, name));
const credentials = process.env.TLS_DIR
  ? grpc.credentials.createSsl(read('ca.crt'), read('client.key'), read('client.crt'))
  : grpc.credentials.createInsecure();
const kv = new epochkv.v1.KVService(process.env.ENDPOINT, credentials);
const transactions = new epochkv.v1.TransactionService(process.env.ENDPOINT, credentials);

const sleep = (ms) => new Promise((resolve) => { setTimeout(resolve, ms); });

// send makes one attempt of a request.
function send(client, method, request) {
  return new Promise((resolve, reject) => {
    const options = { deadline: Date.now() + 5000 };
    client[method](request, new grpc.Metadata(), options, (error, response) => (error ? reject(error) : resolve(response)));
  });
}

// uuid7 is a UUID of version 7 (RFC 9562): 48 bits of milliseconds, and 74 random bits.
function uuid7() {
  const b = crypto.randomBytes(16);
  b.writeUIntBE(Date.now(), 0, 6);
  b[6] = 0x70 | (b[6] & 0x0f);
  b[8] = 0x80 | (b[8] & 0x3f);
  return b;
}

// isLost reports whether an attempt that ended so may have been executed all the same. INTERNAL includes
// OUTCOME_UNKNOWN: the log of the server failed.
function isLost(error) {
  const { UNAVAILABLE, DEADLINE_EXCEEDED, CANCELLED, INTERNAL, UNKNOWN } = grpc.status;
  return [UNAVAILABLE, DEADLINE_EXCEEDED, CANCELLED, INTERNAL, UNKNOWN].includes(error.code);
}

// write sends a request until its outcome is known. An exception means that it was not executed, unless
// the exception says otherwise.
async function write(client, method, request, attempts = 100) {
  const identified = { ...request, request_id: uuid7() }; // once, before the first attempt
  let lost = false;
  for (let n = 0; n < attempts; n += 1) {
    try {
      return await send(client, method, identified);
    } catch (error) {
      if (!isLost(error)) {
        if (!lost || !(await wasExecuted(identified.request_id))) throw error;
      }
      lost = true;
      await sleep(Math.random() * Math.min(1000, 20 * 2 ** n));
    }
  }
  throw new Error(`whether the request ${identified.request_id.toString('hex')} was executed is not known`);
}

// wasExecuted decides what became of a lost attempt, after a later one was refused: the refusal says
// nothing of the lost one. With the fence, the request is not executed after the answer.
async function wasExecuted(id) {
  const outcome = await send(transactions, 'GetOutcome', { request_id: id, fence: true });
  if (outcome.state === 'OUTCOME_STATE_EXPIRED') throw new Error('the request is too old: read the data');
  return outcome.state === 'OUTCOME_STATE_APPLIED';
}

async function main() {
  const count = Number(process.env.COUNT || 1000);
  const key = Buffer.from('examples/node');
  const request = { invocation: { key, increment: { delta: 1 }, return_new: true } };
  let again = 0;
  for (let i = 0; i < count; i += 1) {
    const response = await write(kv, 'Invoke', request);
    again += response.deduplicated ? 1 : 0;
  }
  const { value } = await send(kv, 'Get', { key });
  console.log(`node: ${value} of ${count}; ${again} were answered by an attempt after the one that was executed`);
  if (Number(value) !== count) process.exitCode = 1;
}

main().then(() => { kv.close(); transactions.close(); }, (error) => { console.error(error); process.exit(1); });
