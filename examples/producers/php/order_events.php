<?php

// The order service's events: how they are made, and how they are published.

declare(strict_types=1);

use PhpAmqpLib\Channel\AMQPChannel;
use PhpAmqpLib\Connection\AMQPStreamConnection;
use PhpAmqpLib\Message\AMQPMessage;
use PhpAmqpLib\Wire\AMQPTable;
use Ramsey\Uuid\Uuid;

const ORDER_PLACED = 'order.order.placed.v1';

/** A line of an order. PDO gives a numeric as a string: leave it one. */
function line(string $productId, string $quantity): array
{
    return ['productId' => $productId, 'quantity' => $quantity];
}

/** The body for the outbox row, made once, in the transaction that places the order. */
function order_placed(string $orderId, string $customerId, array $lines): string
{
    return json_encode([
        'event_id' => Uuid::uuid7()->toString(),
        'event_name' => ORDER_PLACED,
        'occurred_at' => (new DateTimeImmutable('now', new DateTimeZone('UTC')))->format('Y-m-d\TH:i:s.v\Z'),
        'payload' => [
            'orderId' => $orderId,
            'customerId' => $customerId,
            'lines' => array_values($lines), // keys with gaps, as array_filter leaves them, would make it an object
        ],
    ], JSON_THROW_ON_ERROR);
}

/** Publishes one message at a time, and returns when the broker has it. */
final class Publisher
{
    public readonly AMQPChannel $channel;
    private string $exchange;

    public function __construct()
    {
        $url = array_map(rawurldecode(...), parse_url(getenv('AMQP_URL')));
        $vhost = substr($url['path'] ?? '//', 1); // the one of /%2f is /
        $connection = new AMQPStreamConnection($url['host'], $url['port'] ?? 5672, $url['user'], $url['pass'], $vhost);
        $this->exchange = getenv('EXCHANGE') ?: 'events';
        $this->channel = $connection->channel();
        $this->channel->confirm_select();
        $this->channel->set_nack_handler(fn () => throw new RuntimeException('the broker refuses the message'));
        $this->channel->set_return_listener(fn () => throw new RuntimeException('no queue takes the message'));
    }

    public function publish(string $eventName, string $eventId, string $body, array $headers = []): void
    {
        $message = new AMQPMessage($body, [
            'content_type' => 'application/json',
            'delivery_mode' => AMQPMessage::DELIVERY_MODE_PERSISTENT,
            'message_id' => $eventId,
            'application_headers' => new AMQPTable($headers),
        ]);
        $this->channel->basic_publish($message, $this->exchange, $eventName, mandatory: true);
        $this->channel->wait_for_pending_acks_returns(timeout: 30);
    }
}
