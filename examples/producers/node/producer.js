// What an order service does with its events; ../README.md explains the commands.

import { createInterface } from 'node:readline';
import { v7 as uuid } from 'uuid';
import { ORDER_PLACED, orderPlaced, Publisher } from './order-events.js';

// A header of each type that this client can send.
const HEADERS = {
  traceparent: '00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01',
  attempt: 1,
  year: 2026,
  population: 100_000,
  serial: 2 ** 40,
  replay: false,
  weight: 0.5,
  price: { '!': 'decimal', value: { digits: 314, places: 2 } },
  placed: { '!': 'timestamp', value: 1_796_030_127 },
  digest: Buffer.from([0x00, 0xff]),
  shop: { id: 7, tags: ['a', null] },
};

// Writes the outbox rows of so many orders, one a line.
function orders(count) {
  for (let n = 1; n <= count; n++) {
    const lines = ['2.000', `${n}.125`, '100'].map((quantity) => ({ productId: uuid(), quantity }));
    console.log(orderPlaced(uuid(), uuid(), lines));
  }
}

// Publishes the rows, in their order.
async function relay() {
  const publisher = await Publisher.connect();
  for await (const body of createInterface({ input: process.stdin })) {
    const event = JSON.parse(body);
    await publisher.publish(event.event_name, event.event_id, body, HEADERS);
    // Only now: update outbox set published_at = now() where event_id = …
    console.log(event.event_id);
  }
  await publisher.close();
}

// Publishes what the service must refuse, and prints each body with what the reason says.
async function broken() {
  const event = () => JSON.parse(orderPlaced(uuid(), uuid(), [{ productId: uuid(), quantity: '2.5' }]));
  const [number, date, missing, buffer] = [event(), event(), event(), event()];
  number.payload.lines[0].quantity = 2.5;
  date.occurred_at = String(new Date());
  missing.payload.customerId = undefined; // JSON.stringify drops it
  buffer.payload.lines[0].productId = Buffer.from('01939c5e111170008000000000000001', 'hex');
  const mistakes = [
    [number, 'payload.lines[0].quantity', 'floating point `2.5`'],
    [date, 'occurred_at', 'RFC 3339 time with an offset'],
    [missing, 'payload', 'missing field `customerId`'],
    [buffer, 'payload.lines[0].productId', 'a UUID as a string'],
  ];
  const publisher = await Publisher.connect();
  for (const [wrong, place, rule] of mistakes) {
    const body = JSON.stringify(wrong);
    await publisher.publish(ORDER_PLACED, uuid(), body, HEADERS);
    console.log(JSON.stringify({ body, place, rule }));
  }
  await publisher.close();
}

// Takes a message out of a queue, and prints it as this client sees it.
async function read(queue) {
  const publisher = await Publisher.connect();
  const { content, properties } = await publisher.channel.get(queue, { noAck: true });
  const { headers, ...others } = properties;
  console.log(JSON.stringify({ properties: others, headers, body: content.toString() }));
  await publisher.close();
}

const [command, argument] = process.argv.slice(2);
switch (command) {
  case 'orders':
    orders(Number(argument));
    break;
  case 'relay':
    await relay();
    break;
  case 'broken':
    await broken();
    break;
  case 'read':
    await read(argument);
    break;
  default:
    console.error('usage: producer.js orders COUNT | relay | broken | read QUEUE');
    process.exitCode = 2;
}
