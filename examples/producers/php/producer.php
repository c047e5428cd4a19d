<?php

// What an order service does with its events; ../README.md explains the commands.

declare(strict_types=1);

use PhpAmqpLib\Wire\AMQPDecimal;
use Ramsey\Uuid\Uuid;

require __DIR__.'/autoload.php';
require __DIR__.'/order_events.php';

function id(): string
{
    return Uuid::uuid7()->toString();
}

/** A header of each type that this client can send. */
function headers(): array
{
    return [
        'traceparent' => '00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01',
        'attempt' => 1,
        'serial' => 2 ** 40,
        'replay' => false,
        'weight' => 0.5,
        'price' => new AMQPDecimal(314, 2),
        'placed' => new DateTimeImmutable('2026-11-30T09:15:27Z'),
        'shop' => ['id' => 7, 'tags' => ['a', null]],
    ];
}

/** Writes the outbox rows of so many orders, one a line. */
function orders(int $count): void
{
    for ($n = 1; $n <= $count; ++$n) {
        echo order_placed(id(), id(), [line(id(), '2.000'), line(id(), "$n.125"), line(id(), '100')]), "\n";
    }
}

/** Publishes the rows, in their order. */
function relay(): void
{
    $publisher = new Publisher();
    while (($row = fgets(STDIN)) !== false) {
        $body = rtrim($row, "\n");
        $event = json_decode($body, flags: JSON_THROW_ON_ERROR);
        $publisher->publish($event->event_name, $event->event_id, $body, headers());
        // Only now: update outbox set published_at = now() where event_id = …
        echo $event->event_id, "\n";
    }
}

/** Publishes what the service must refuse, and prints each body with what the reason says. */
function broken(): void
{
    $event = json_decode(order_placed(id(), id(), [line(id(), '2.5'), line(id(), '1')]), true);
    $float = $gaps = $empty = $time = $event;
    $float['payload']['lines'][0]['quantity'] = 2.5;
    unset($gaps['payload']['lines'][0]);
    $empty['payload'] = [];
    $time['occurred_at'] = date('Y-m-d H:i:s');
    $mistakes = [
        [json_encode($float), 'payload.lines[0].quantity', 'floating point `2.5`'],
        [json_encode($gaps), 'payload.lines', 'an array of lines'],
        [json_encode($empty), 'payload', 'expected an object'],
        [json_encode($time), 'occurred_at', 'RFC 3339 time with an offset'],
        [serialize($event), 'body', 'expected value'],
    ];
    $publisher = new Publisher();
    foreach ($mistakes as [$body, $place, $rule]) {
        $publisher->publish(ORDER_PLACED, id(), $body, headers());
        echo json_encode(compact('body', 'place', 'rule')), "\n";
    }
}

/** Takes a message out of a queue, and prints it as this client sees it. */
function read(string $queue): void
{
    $message = (new Publisher())->channel->basic_get($queue, no_ack: true);
    $properties = $message->get_properties();
    $headers = $properties['application_headers']->getNativeData();
    unset($properties['application_headers']);
    echo json_encode(['properties' => $properties, 'headers' => $headers, 'body' => $message->getBody()]), "\n";
}

match ($argv[1] ?? null) {
    'orders' => orders((int) $argv[2]),
    'relay' => relay(),
    'broken' => broken(),
    'read' => read($argv[2]),
    default => exit(fwrite(STDERR, "usage: producer.php orders COUNT | relay | broken | read QUEUE\n") ? 2 : 1),
};
