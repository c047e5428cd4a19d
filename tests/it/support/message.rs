//! Messages as the tests see them: properties, headers and their types.

use std::collections::BTreeMap;

use lapin::BasicProperties;
use lapin::types::{AMQPValue, FieldTable};

/// A message taken out of a queue.
#[derive(Debug)]
pub struct Message {
    pub body: Vec<u8>,
    pub properties: BasicProperties,
}

impl Message {
    /// A header as it is.
    pub fn header(&self, name: &str) -> Option<&AMQPValue> {
        self.properties.headers().as_ref()?.inner().get(name)
    }

    /// A header that must be text.
    pub fn text(&self, name: &str) -> String {
        match self.header(name) {
            Some(AMQPValue::LongString(text)) => String::from_utf8_lossy(text.as_bytes()).into_owned(),
            other => panic!("header {name} is {other:?}"),
        }
    }

    /// The names of all headers, sorted, without those that the broker itself adds to a delivery.
    pub fn header_names(&self) -> Vec<&str> {
        let headers = self.properties.headers().iter().flat_map(|headers| headers.inner().keys());
        headers.map(|name| name.as_str()).filter(|name| !name.starts_with("x-")).collect()
    }

    /// A header that must be a 32-bit integer.
    pub fn number(&self, name: &str) -> i32 {
        match self.header(name) {
            Some(AMQPValue::LongInt(number)) => *number,
            other => panic!("header {name} is {other:?}"),
        }
    }
}

/// A header value that is text.
pub fn text(text: &str) -> AMQPValue {
    AMQPValue::LongString(text.into())
}

/// A table of headers or arguments.
pub fn table(entries: &[(&str, AMQPValue)]) -> FieldTable {
    let entries = entries.iter().map(|(name, value)| ((*name).into(), value.clone()));
    entries.collect::<BTreeMap<_, _>>().into()
}

/// The properties of an ordinary event: persistent, and nothing else.
pub fn persistent() -> BasicProperties {
    BasicProperties::default().with_delivery_mode(2)
}

/// The properties of an ordinary event with these headers.
pub fn with_headers(headers: &[(&str, AMQPValue)]) -> BasicProperties {
    persistent().with_headers(table(headers))
}
