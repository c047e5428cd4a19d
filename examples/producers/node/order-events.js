// The order service's events: how they are made, and how they are published.

import amqp from 'amqplib';
import { v7 as uuid } from 'uuid';

export const ORDER_PLACED = 'order.order.placed.v1';

// The body for the outbox row, made once, in the transaction that places the order.
// A quantity is the string that the database gives for a numeric: a number would be rounded.
export function orderPlaced(orderId, customerId, lines) {
  return JSON.stringify({
    event_id: uuid(),
    event_name: ORDER_PLACED,
    occurred_at: new Date().toISOString(),
    payload: {
      orderId,
      customerId,
      lines: lines.map(({ productId, quantity }) => ({ productId, quantity })),
    },
  });
}

// Publishes one message at a time, and returns when the broker has it.
export class Publisher {
  static async connect() {
    const connection = await amqp.connect(process.env.AMQP_URL);
    const publisher = new Publisher();
    publisher.connection = connection;
    publisher.channel = await connection.createConfirmChannel();
    publisher.exchange = process.env.EXCHANGE ?? 'events';
    return publisher;
  }

  async publish(eventName, eventId, body, headers) {
    const options = {
      contentType: 'application/json',
      persistent: true,
      messageId: eventId,
      mandatory: true,
      headers,
    };
    let returned = false;
    const onReturn = () => (returned = true);
    this.channel.once('return', onReturn); // comes before the confirm
    await new Promise((resolve, reject) => {
      const confirmed = (error) => (error ? reject(error) : resolve());
      this.channel.publish(this.exchange, eventName, Buffer.from(body), options, confirmed);
    }).finally(() => this.channel.off('return', onReturn));
    if (returned) throw new Error(`no queue takes ${eventName}`);
  }

  async close() {
    await this.connection.close();
  }
}
