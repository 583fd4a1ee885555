import { call, seconds } from './api.js';
import { count, moment, size, time } from './format.js';
import { html, Problem, useLoad } from './ui.js';

// Backups shows the backup that is being made, and the last one. The others are listed by kvctl, which reads the object store itself.
export function Backups() {
  const { value, error } = useLoad(() => call('BackupService/GetBackupStatus'), 5);
  const running = value && value.running, last = value && value.last;
  return html`<${Problem} error=${error} />
    ${running ? html`<section class="panel"><h2>Running since ${moment(running.startTime)}</h2>
      <p>To <code>${running.target}</code>: ${count(running.progress.pages)} of ${count(running.progress.pagesTotal)} pages, ${size(running.progress.bytesSent)} sent.
      It keeps ${size(running.pinnedBytes)} of freed pages.</p></section>` : html`<p>No backup is being made.</p>`}
    ${last ? html`<section class="panel"><h2>The last one ended ${moment(last.endTime)}</h2>
      ${last.backup ? html`<p>Backup <code>${last.backup.id}</code> (${last.backup.kind}) of epoch ${last.backup.epoch}: ${size(last.backup.bytes)} in ${count(last.backup.parts)} parts,
        in ${time(seconds(last.duration))}, to <code>${last.target}</code>.</p>` : html`<p class="error">It failed: ${last.error}</p>`}</section>`
    : value ? html`<p class="dim">None has ended since the server was started; kvctl backup list shows those that there are.</p>` : ''}`;
}
