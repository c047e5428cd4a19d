<?php

// Composer's classes, or else those of Debian's packages php-amqplib and php-ramsey-uuid.

declare(strict_types=1);

if (is_file(__DIR__.'/vendor/autoload.php')) {
    require __DIR__.'/vendor/autoload.php';
} else {
    require 'PhpAmqpLib/autoload.php';
    require 'Ramsey/Uuid/autoload.php';
}
