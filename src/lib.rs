//! stock
pub mod broker;
pub mod cli;
pub mod db;
pub mod handlers;
pub mod inbox;
pub mod message;
pub mod settings;
pub mod stock;
pub mod telemetry;
pub mod worker;
