//! The guarantee: an event takes effect once. Knows nothing of the broker and nothing of the business.

mod guard;
mod processor;
pub mod purge;

pub use guard::Fresh;
pub use processor::{Dispatch, Interrupted, Processor, Progress};
