<?php

// Composer's classes, or else those of Debian's packages php-symfony-amqp-messenger, php-symfony-serializer,
// php-symfony-property-access, php-xml and php-ramsey-uuid.

declare(strict_types=1);

if (is_file(__DIR__.'/vendor/autoload.php')) {
    require __DIR__.'/vendor/autoload.php';
} else {
    require 'Symfony/Component/Messenger/Bridge/Amqp/autoload.php';
    require 'Symfony/Component/Serializer/autoload.php';
    require 'Symfony/Component/PropertyAccess/autoload.php';
    require 'Ramsey/Uuid/autoload.php';
}
require __DIR__.'/OutboxEvent.php';
require __DIR__.'/EventSerializer.php';
