// Opens the console in a real browser and looks at every page: at three widths, light and dark, by keyboard, and under axe.
// usage: node test.mjs URL BROWSER LEASE [DIRECTORY FOR SCREENSHOTS]
// The server has what tools/test-console.sh makes: the lease LEASE with a key, another one, which holds the lock "job", the users ann
// and bob, and a log archive.

import { readFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import { chromium } from 'playwright-core';

const [url, executablePath, lease, shots] = process.argv.slice(2);
const axe = readFileSync(createRequire(import.meta.url).resolve('axe-core/axe.min.js'), 'utf8');
const pages = ['overview', 'activity', 'slow', 'space', 'keys', 'leases', 'backups', 'archive', 'users', 'configuration'];
let failures = 0;
const fail = (text) => { failures++; console.error('FAIL: ' + text); };
const expect = (ok, text) => { if (!ok) fail(text); };

const browser = await chromium.launch({ executablePath, args: ['--no-sandbox'] });

async function open(options) {
  const context = await browser.newContext(options);
  const page = await context.newPage();
  page.on('pageerror', (e) => fail('script: ' + e));
  page.on('console', (m) => { if (m.type() === 'error' && !/status of (4|5)\d\d/.test(m.text())) fail('browser: ' + m.text()); });
  page.on('request', (r) => { if (!r.url().startsWith(url)) fail('a request leaves the server: ' + r.url()); });
  await page.goto(url + 'console/');
  await page.waitForSelector('.verdict b');
  return { context, page };
}

async function logIn(page, user) {
  await page.goto(`${url}console/#users`);
  await page.fill('input[name=user]', user);
  await page.fill('input[name=password]', user + '-password');
  await page.keyboard.press('Enter');
  await page.waitForSelector('button:text-is("Log out")');
}

async function lookUpLock(page) {
  await page.fill('input[name=lock]', 'job');
  await page.keyboard.press('Enter');
  await page.waitForSelector('section.panel:has-text("Held by lease")');
}

const row = (page, caption, text) => page.locator('table', { has: page.locator('caption', { hasText: new RegExp('^' + caption) }) }).locator('tbody tr', { hasText: text });

for (const colorScheme of ['light', 'dark']) {
  for (const width of [400, 900, 1600]) {
    const { context, page } = await open({ viewport: { width, height: 900 }, colorScheme });
    await logIn(page, 'ann');
    for (const name of pages) {
      await page.goto(`${url}console/#${name}`);
      await page.waitForFunction((n) => document.querySelector(`nav a[href="#${n}"]`)?.getAttribute('aria-current') === 'page', name);
      await page.waitForTimeout(name === 'overview' ? 400 : 250);
      if (name === 'leases') await lookUpLock(page);
      const wide = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
      expect(wide <= 0, `${name} at ${width} px is ${wide} px too wide`);
      // The policy of the page forbids inline scripts; what the driver evaluates is not bound by it.
      const violations = await page.evaluate(async (source) => {
        (0, eval)(source);
        return (await axe.run(document)).violations.map((v) => `${v.id}: ${v.help}: ${v.nodes[0].html}`);
      }, axe).catch((e) => [String(e)]);
      violations.forEach((v) => fail(`${name}, ${width} px, ${colorScheme}: ${v}`));
      if (shots) await page.screenshot({ path: `${shots}/${name}-${width}-${colorScheme}.png`, fullPage: true });
    }
    await context.close();
  }
}

// By keyboard alone: skip link, navigation, and a key with its value and history.
{
  const { context, page } = await open({ viewport: { width: 1200, height: 900 } });
  await page.keyboard.press('Tab');
  expect(await page.evaluate(() => document.activeElement.className) === 'skip', 'the first stop is not the skip link');
  for (let i = 0; i < 5; i++) await page.keyboard.press('Tab');
  await page.keyboard.press('Enter');
  await page.waitForSelector('h1:text-is("Keys")');
  await page.waitForSelector('button.link');
  for (let i = 0; i < 12 && await page.evaluate(() => document.activeElement.className) !== 'link'; i++) await page.keyboard.press('Tab');
  const key = await page.evaluate(() => document.activeElement.textContent);
  await page.keyboard.press('Enter');
  await page.waitForSelector('pre');
  expect(await page.textContent('h2.bytes') === key, 'the chosen key is not shown');
  expect(await page.getByText('History, as far as it is kept').count() > 0, 'no history is shown');
  await context.close();
}

// Without a login, users are not shown; without the action users, a user sees its own rights and tokens.
{
  const { context, page } = await open({ viewport: { width: 1200, height: 900 } });
  await page.goto(url + 'console/#users');
  await page.waitForSelector('form[aria-label="Log in"]');
  expect(await page.locator('table').count() === 0, 'users are shown without a login');
  await logIn(page, 'bob');
  await page.waitForSelector('h2:text-is("User bob")');
  expect(!/\bann\b/.test(await page.textContent('#main')), 'bob sees another user');
  await context.close();
}

// The pages show what there is; what changes something asks first, and works by keyboard.
{
  const { context, page } = await open({ viewport: { width: 1200, height: 900 } });
  let asked = '', answer = false;
  page.on('dialog', (d) => { asked = d.message(); return answer ? d.accept() : d.dismiss(); });
  const press = async (button, confirmed) => {
    asked = ''; answer = confirmed;
    await button.focus();
    await page.keyboard.press('Enter');
    await page.waitForTimeout(300);
  };
  await page.goto(url + 'console/#archive');
  await page.waitForSelector('dt:text-is("Lag")');
  expect(/Archiving\./.test(await page.textContent('#main')), 'the archive does not archive');
  const trace = '4bf92f3577b34da6a3ce929d0e0e4736'; // of a client that sends one
  await page.route('**/*AdminService/SlowRequests', async (route) => {
    const answer = await route.fetch();
    const body = await answer.json();
    expect(body.requests.length > 0 && body.requests.every((r) => r.traceId === ''), 'no slow requests, or with a trace');
    Object.assign(body.requests[0], { traceId: trace });
    await route.fulfill({ response: answer, json: body });
  });
  await page.goto(url + 'console/#slow');
  await row(page, 'Slowest requests', trace).waitFor();

  await page.goto(url + 'console/#leases');
  await row(page, 'Leases', 'worker').waitFor();
  expect(await row(page, 'Leases', '').count() === 2, 'two leases are not listed');
  await press(page.getByLabel('Keys of lease ' + lease, { exact: true }), true);
  await row(page, 'Keys that the end', 'leased').waitFor();
  await row(page, 'Locks that are held', 'job').waitFor();
  await lookUpLock(page);
  await press(page.getByLabel('Release lock job'), false);
  expect(asked.startsWith('Release lock job?'), 'releasing a lock asks: ' + asked);
  expect(await page.locator('section.panel:has-text("Held by lease")').count() === 1, 'a lock is released without consent');
  await press(page.getByLabel('Release lock job'), true);
  await page.waitForSelector('p:has-text("No lease holds lock job")');
  await press(page.getByLabel('Revoke lease ' + lease, { exact: true }), false);
  expect(asked.startsWith(`Revoke lease ${lease}?`), 'revoking a lease asks: ' + asked);
  expect(await row(page, 'Leases', 'worker').count() === 1, 'a lease is revoked without consent');
  await press(page.getByLabel('Revoke lease ' + lease, { exact: true }), true);
  await page.waitForFunction((id) => !document.querySelector(`[aria-label="Revoke lease ${id}"]`), lease);

  await logIn(page, 'ann');
  await row(page, 'Users', 'bob').waitFor();
  await row(page, 'Roles', 'user/').waitFor();
  await press(page.getByLabel('Disable user bob'), false);
  expect(asked.startsWith('Disable user bob?'), 'disabling a user asks: ' + asked);
  expect(await page.getByLabel('Enable user bob').count() === 0, 'a user is disabled without consent');
  await press(page.getByLabel('Disable user bob'), true);
  await page.getByLabel('Enable user bob').waitFor();
  const revoke = row(page, 'Tokens of all users', 'bob').first().getByRole('button');
  const token = (await revoke.getAttribute('aria-label')).replace('Revoke token ', '');
  await press(revoke, true);
  expect(asked.startsWith(`Revoke token ${token}?`), 'revoking a token asks: ' + asked);
  await page.waitForFunction((id) => !document.querySelector(`[aria-label="Revoke token ${id}"]`), token);
  await context.close();
}

// A read-only console offers nothing that changes something.
{
  const { context, page } = await open({ viewport: { width: 1200, height: 900 } });
  await page.route('**/api/about', (route) => route.fulfill({ json: { users: false, changes: false, login: true } }));
  await logIn(page, 'ann');
  await page.reload();
  for (const [name, caption] of [['users', 'Users'], ['leases', 'Leases']]) {
    await page.goto(`${url}console/#${name}`);
    await row(page, caption, '').first().waitFor();
    if (name === 'leases') await page.waitForSelector('p:has-text("The console is read-only")');
    const found = await page.locator('button:text-matches("^(Revoke|Release|Disable|Enable|End)$")').count();
    expect(found === 0, `${name}: ${found} buttons of a read-only console change something`);
  }
  await context.close();
}

const { context, page } = await open({});
expect(/^(OK|WARN|CRIT)/.test(await page.textContent('.verdict')), 'the first line has no verdict');
expect(await page.evaluate(() => document.querySelectorAll('svg.chart polyline').length) > 10, 'charts are missing');
await context.close();
await browser.close();
console.log(failures ? `${failures} failures` : `ok: ${pages.length} pages, 3 widths, light and dark, keyboard, axe`);
process.exit(failures ? 1 : 0);
