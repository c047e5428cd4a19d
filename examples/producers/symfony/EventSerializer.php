<?php

declare(strict_types=1);

namespace Shop;

use Symfony\Component\Messenger\Envelope;
use Symfony\Component\Messenger\Exception\MessageDecodingFailedException;
use Symfony\Component\Messenger\Transport\Serialization\SerializerInterface;

/** Speaks the contract: the body is the event, and no class name and no stamp goes with it. */
final class EventSerializer implements SerializerInterface
{
    public function encode(Envelope $envelope): array
    {
        return ['body' => $envelope->getMessage()->body, 'headers' => ['Content-Type' => 'application/json']];
    }

    public function decode(array $encodedEnvelope): Envelope
    {
        $body = $encodedEnvelope['body'];
        $event = json_decode($body);
        if (!isset($event->event_id, $event->event_name)) {
            throw new MessageDecodingFailedException('No event of the shop.');
        }

        return new Envelope(new OutboxEvent($event->event_id, $event->event_name, $body));
    }
}
