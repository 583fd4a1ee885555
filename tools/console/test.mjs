// Opens the console in a real browser and looks at every page: at three widths, light and dark, by keyboard, and under axe.
// usage: node test.mjs URL BROWSER [DIRECTORY FOR SCREENSHOTS]

import { readFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import { chromium } from 'playwright-core';

const [url, executablePath, shots] = process.argv.slice(2);
const axe = readFileSync(createRequire(import.meta.url).resolve('axe-core/axe.min.js'), 'utf8');
const pages = ['overview', 'activity', 'slow', 'space', 'keys', 'backups', 'configuration'];
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

for (const colorScheme of ['light', 'dark']) {
  for (const width of [400, 900, 1600]) {
    const { context, page } = await open({ viewport: { width, height: 900 }, colorScheme });
    for (const name of pages) {
      await page.goto(`${url}console/#${name}`);
      await page.waitForFunction((n) => document.querySelector(`nav a[href="#${n}"]`)?.getAttribute('aria-current') === 'page', name);
      await page.waitForTimeout(name === 'overview' ? 400 : 250);
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

const { context, page } = await open({});
expect(/^(OK|WARN|CRIT)/.test(await page.textContent('.verdict')), 'the first line has no verdict');
expect(await page.evaluate(() => document.querySelectorAll('svg.chart polyline').length) > 10, 'charts are missing');
await context.close();
await browser.close();
console.log(failures ? `${failures} failures` : `ok: ${pages.length} pages, 3 widths, light and dark, keyboard, axe`);
process.exit(failures ? 1 : 0);
