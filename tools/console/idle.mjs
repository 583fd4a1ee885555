// Opens the first page of the console and leaves it open until it is killed: node idle.mjs URL BROWSER. It prints a line when the page is there.
import { chromium } from 'playwright-core';

const [url, executablePath] = process.argv.slice(2);
const browser = await chromium.launch({ executablePath, args: ['--no-sandbox'] });
const page = await browser.newPage();
await page.goto(url + 'console/');
await page.waitForSelector('.verdict b');
console.log('open');
