//! All integration tests, on the real servers that `DATABASE_URL` and `AMQP_URL` name.
//!
//! Each test has a database, an exchange and queues of its own, and ends with an audit of them.

mod support;

mod batches;
mod double_delivery;
