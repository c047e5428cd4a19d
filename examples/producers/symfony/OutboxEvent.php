<?php

declare(strict_types=1);

namespace Shop;

/** A row of the outbox on its way to the broker: the body is published as it was written. */
final class OutboxEvent
{
    public function __construct(
        public readonly string $id,
        public readonly string $name,
        public readonly string $body,
    ) {
    }
}
