//! All integration tests, on the real servers that `DATABASE_URL` and `AMQP_URL` name.
//!
//! Each test has a database, an exchange and queues of its own, and ends with an audit of them.

#![allow(clippy::expect_used, clippy::panic, reason = "a test says what it expects by failing")]
#![allow(unreachable_pub, reason = "nobody imports a test")]

mod support;

mod architecture;
mod asyncapi;
mod batches;
mod broker_faults;
mod broker_rights;
mod check;
mod cli;
mod commit;
mod contract;
mod copies;
mod copy_properties;
mod crash_recovery;
mod database_faults;
mod decoder_properties;
mod docs;
mod doctor;
mod double_delivery;
mod failure_queue;
mod handler_failure;
mod http;
mod kubernetes;
mod malformed;
mod memory;
mod neighbours;
mod network_faults;
mod observability;
mod order_at_once;
mod order_status;
mod other_applications;
mod outage;
mod pgbouncer;
mod placement;
mod producers;
mod purge;
mod purge_refusals;
mod reconnect;
mod reservations;
mod retries;
mod retry_count;
mod secret_files;
mod secrets;
mod settings;
mod shutdown;
mod sqlstates;
mod start;
mod tls_broker;
mod tls_database;
mod topology;
mod transactions;
mod unreadable;
mod vectors;
mod window;
