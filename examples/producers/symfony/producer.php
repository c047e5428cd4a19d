<?php

// What a Symfony order service does with its events; ../README.md explains the commands.

declare(strict_types=1);

use Ramsey\Uuid\Uuid;
use Shop\EventSerializer;
use Shop\OutboxEvent;
use Symfony\Component\Messenger\Bridge\Amqp\Transport\AmqpReceivedStamp;
use Symfony\Component\Messenger\Bridge\Amqp\Transport\AmqpStamp;
use Symfony\Component\Messenger\Bridge\Amqp\Transport\AmqpTransport;
use Symfony\Component\Messenger\Bridge\Amqp\Transport\Connection;
use Symfony\Component\Messenger\Envelope;
use Symfony\Component\Messenger\Transport\Serialization\PhpSerializer;
use Symfony\Component\Messenger\Transport\Serialization\Serializer;
use Symfony\Component\Messenger\Transport\Serialization\SerializerInterface;

require __DIR__.'/autoload.php';

const ORDER_PLACED = 'order.order.placed.v1';

function id(): string
{
    return Uuid::uuid7()->toString();
}

/** The transport, with the options that messenger.yaml takes, too. */
function transport(SerializerInterface $serializer, array $queues = []): AmqpTransport
{
    $connection = Connection::fromDsn(getenv('AMQP_URL'), [
        'auto_setup' => false, // it would declare the exchange as a fanout, and a queue of its own
        'confirm_timeout' => 30, // without it, nothing waits for confirms
        'exchange' => ['name' => getenv('EXCHANGE') ?: 'events', 'type' => 'topic'],
        'queues' => array_fill_keys($queues, []),
    ]);
    $connection->channel()->setReturnCallback(fn () => throw new RuntimeException('no queue takes the message'));

    return new AmqpTransport($connection, $serializer);
}

/** Goes with a message: without it, the routing key would be empty, and no queue would take the message. */
function stamp(string $eventName, string $eventId): AmqpStamp
{
    // A header of each type that this client can send.
    $headers = [
        'traceparent' => '00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01',
        'attempt' => 1,
        'replay' => false,
        'weight' => 0.5,
        'price' => new AMQPDecimal(2, 314),
        'placed' => new AMQPTimestamp(1_796_030_127),
        'shop' => ['id' => 7, 'tags' => ['a', null]],
    ];

    return new AmqpStamp($eventName, AMQP_MANDATORY, ['message_id' => $eventId, 'headers' => $headers]);
}

/**
 * The body for the outbox row, made once, in the transaction that places the order. Doctrine gives a decimal as a
 * string: leave it one.
 */
function orderPlaced(string $orderId, string $customerId, array $lines): string
{
    return json_encode([
        'event_id' => id(),
        'event_name' => ORDER_PLACED,
        'occurred_at' => (new DateTimeImmutable('now', new DateTimeZone('UTC')))->format('Y-m-d\TH:i:s.v\Z'),
        'payload' => ['orderId' => $orderId, 'customerId' => $customerId, 'lines' => array_values($lines)],
    ], JSON_THROW_ON_ERROR);
}

/** Writes the outbox rows of so many orders, one a line. */
function orders(int $count): void
{
    for ($n = 1; $n <= $count; ++$n) {
        $line = fn (string $quantity) => ['productId' => id(), 'quantity' => $quantity];
        echo orderPlaced(id(), id(), array_map($line, ['2.000', "$n.125", '100'])), "\n";
    }
}

/** Publishes the rows, in their order. */
function relay(): void
{
    $transport = transport(new EventSerializer());
    while (($row = fgets(STDIN)) !== false) {
        $body = rtrim($row, "\n");
        $event = json_decode($body, flags: JSON_THROW_ON_ERROR);
        $message = new OutboxEvent($event->event_id, $event->event_name, $body);
        $transport->send(new Envelope($message, [stamp($message->name, $message->id)]));
        // Only now: update outbox set published_at = now() where event_id = …
        echo $message->id, "\n";
    }
}

/** Publishes what Symfony's own serializers send, and prints each body with what the reason says. */
function broken(): void
{
    $mistakes = [
        // messenger.transport.native_php_serializer, the default
        [new PhpSerializer(), 'body', 'expected value'],
        // messenger.transport.symfony_serializer: the message's own fields; its class is in the header `type`
        [Serializer::create(), 'body', 'missing field `event_id`'],
    ];
    foreach ($mistakes as [$serializer, $place, $rule]) {
        $message = new OutboxEvent(id(), ORDER_PLACED, orderPlaced(id(), id(), []));
        $envelope = new Envelope($message, [stamp(ORDER_PLACED, $message->id)]);
        transport($serializer)->send($envelope);
        $body = $serializer->encode($envelope)['body'];
        echo json_encode(compact('body', 'place', 'rule')), "\n";
    }
}

/** Takes a message out of a queue, and prints it as this client sees it. */
function read(string $queue): void
{
    $transport = transport(new EventSerializer(), [$queue]);
    foreach ($transport->get() as $envelope) {
        $message = $envelope->last(AmqpReceivedStamp::class)->getAmqpEnvelope();
        echo json_encode([
            'properties' => [
                'content_type' => $message->getContentType(),
                'delivery_mode' => $message->getDeliveryMode(),
                'message_id' => $message->getMessageId(),
                'timestamp' => $message->getTimestamp(),
            ],
            'headers' => $message->getHeaders(),
            'body' => $envelope->getMessage()->body,
        ]), "\n";
        $transport->ack($envelope);
    }
}

match ($argv[1] ?? null) {
    'orders' => orders((int) $argv[2]),
    'relay' => relay(),
    'broken' => broken(),
    'read' => read($argv[2]),
    default => exit(fwrite(STDERR, "usage: producer.php orders COUNT | relay | broken | read QUEUE\n") ? 2 : 1),
};
