//! stock-service consumes `stock.events` from RabbitMQ and reserves the goods of every placed order in PostgreSQL,
//! exactly once in effect, although the broker delivers at least once.
//!
//! A tour, in the order in which a delivery travels:
//!
//! 1. [`broker`] takes what is waiting in the queue, at most a batch, and never waits for more. It is the only home of
//!    AMQP. Each delivery comes with the right to settle it, once.
//! 2. [`message`] turns bytes into a [`Message`](message::Message), by one strict grammar. What it refuses goes to the
//!    failure queue without a transaction. The words of the business, ids and quantities, are in [`stock`].
//! 3. [`inbox`] is the guarantee: in one transaction it claims all events of the batch, has the fresh ones handled, seals
//!    and commits; a batch that fails is halved until the culprit stands alone.
//! 4. [`handlers`] say what happens on each event, set-based and in the inbox's transaction.
//! 5. [`message::RetryPolicy`] turns what happened into a verdict: acknowledge, retry, park.
//! 6. [`broker`] carries it out: copies first, acknowledgements after.
//!
//! [`worker`] is the corridor between these rooms, and the only place that knows both the broker and the database.
//! [`db`] has the pool, the transaction, the migrations, and the one table that tells whose fault an error is.
//! [`tls`] says why a connection by TLS did not come about, to whichever server.
//! [`settings`] reads and checks what can be set; [`telemetry`] has the log, the metrics and what the service knows of its
//! health, and [`http`] shows them; [`cli`] builds everything and is imported by nobody.

pub mod broker;
pub mod cli;
pub mod db;
pub mod handlers;
pub mod http;
pub mod inbox;
pub mod message;
mod outage;
pub mod settings;
pub mod stock;
pub mod telemetry;
pub mod tls;
pub mod worker;

/// The guide's program is compiled and run like any other example.
#[cfg(doctest)]
#[doc = include_str!("../docs/ADDING-AN-EVENT.md")]
mod adding_an_event {}
