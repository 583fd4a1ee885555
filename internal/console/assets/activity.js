import { call, seconds, showBytes } from './api.js';
import { count, moment, size, time } from './format.js';
import { Confirmed, html, Problem, Table, useLoad } from './ui.js';
import { useState } from './vendor/hooks.js';

const name = (constant, prefix) => constant.replace(prefix, '').toLowerCase().replaceAll('_', ' ');
const range = (r) => (r.prefix ? showBytes(r.prefix) + '…' : `${showBytes(r.start) || 'first key'} – ${showBytes(r.end) || 'last key'}`);

// Activity lists what is open and may hold up others, with the means to end it.
export function Activity({ changes }) {
  const [round, again] = useState(0);
  const list = (method, field) => useLoad(async () => (await call('AdminService/' + method))[field], 5, [round]);
  const transactions = list('ListTransactions', 'transactions');
  const snapshots = list('ListSnapshots', 'snapshots');
  const watches = list('ListWatches', 'watches');
  const holds = list('ListHolds', 'holds');
  const end = (method, what) => ({
    title: 'End',
    value: (row) => html`<${Confirmed} text="End" what=${`${what} ${row.id}`} ask="Its client gets an error."
      method=${'AdminService/' + method} message=${{ id: row.id }} done=${() => again(round + 1)} />`,
  });
  const ending = (method, what) => (changes ? [end(method, what)] : []);
  const age = { title: 'Age', number: true, value: (r) => time(seconds(r.age)) };
  const idle = { title: 'Idle', number: true, value: (r) => time(seconds(r.idle)) };
  const id = { title: 'Id', number: true, value: (r) => r.id };
  const peer = { title: 'Client', value: (r) => r.peer || '–' };
  return html`<${Problem} error=${transactions.error || snapshots.error || watches.error || holds.error} />
    ${changes ? '' : html`<p class="dim">The console is read-only: kvctl, or a server with --console=full, ends what is listed here.</p>`}
    <${Table} caption="Transactions" rows=${transactions.value} columns=${[id, peer,
      { title: 'Isolation', value: (r) => name(r.isolation, 'ISOLATION_') + (r.readOnly ? ', read-only' : '') }, age, idle,
      { title: 'Requests', number: true, value: (r) => count(r.requests) }, { title: 'Memory', number: true, value: (r) => size(r.bytes) },
      ...ending('EndTransaction', 'transaction')]} />
    <${Table} caption="Snapshots, which keep old versions" rows=${snapshots.value} columns=${[id, { title: 'Kind', value: (r) => name(r.kind, 'KIND_') }, peer,
      { title: 'Epoch', number: true, value: (r) => r.epoch }, age, idle, ...ending('EndSnapshot', 'snapshot')]} />
    <${Table} caption="Watches" rows=${watches.value} columns=${[id, peer, { title: 'Keys', value: (r) => html`<span class="bytes">${r.ranges.map(range).join(', ') || 'all'}</span>` },
      { title: 'State', value: (r) => name(r.state, 'STATE_') }, { title: 'Behind', number: true, value: (r) => count(r.lag) + ' epochs' },
      { title: 'Queued', number: true, value: (r) => size(r.queuedBytes) }, age, idle, ...ending('EndWatch', 'watch')]} />
    <${Table} caption="Holds, which keep the past" rows=${holds.value} columns=${[id, { title: 'Owner', value: (r) => r.owner },
      { title: 'Epoch', number: true, value: (r) => r.epoch }, { title: 'Until', value: (r) => moment(Number(r.deadlineMs)) }, ...ending('EndHold', 'hold')]} />`;
}
