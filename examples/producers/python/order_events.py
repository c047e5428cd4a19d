"""The order service's events: how they are made, and how they are published."""

import json
import os
from datetime import datetime, timezone

import pika
from uuid6 import uuid7  # from Python 3.14 on: from uuid import uuid7

ORDER_PLACED = "order.order.placed.v1"


def order_placed(order_id, customer_id, lines):
    """The body for the outbox row, made once, in the transaction that places the order.

    `lines` are pairs of a product's UUID and a Decimal.
    """
    return json.dumps({
        "event_id": str(uuid7()),
        "event_name": ORDER_PLACED,
        "occurred_at": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
        "payload": {
            "orderId": str(order_id),
            "customerId": str(customer_id),
            # format(…, "f"), since str(Decimal("1E+2")) is "1E+2".
            "lines": [{"productId": str(product), "quantity": format(quantity, "f")} for product, quantity in lines],
        },
    })


class Publisher:
    """Publishes one message at a time, and returns when the broker has it."""

    def __init__(self):
        self.exchange = os.environ.get("EXCHANGE", "events")
        self.connection = pika.BlockingConnection(pika.URLParameters(os.environ["AMQP_URL"]))
        self.channel = self.connection.channel()
        # From now on basic_publish waits for the confirm, and raises NackError or, without a queue, UnroutableError.
        self.channel.confirm_delivery()

    def publish(self, event_name, event_id, body, headers=None):
        properties = pika.BasicProperties(
            content_type="application/json",
            delivery_mode=pika.DeliveryMode.Persistent.value,
            message_id=event_id,
            headers=headers,
        )
        self.channel.basic_publish(self.exchange, event_name, body, properties, mandatory=True)

    def close(self):
        self.connection.close()
