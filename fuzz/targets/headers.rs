//! Whatever properties can come over the wire, their copy can go over it, fits a frame, and is the last change: a copy of a
//! copy says the same.

#![no_main]

use std::io::Cursor;

use lapin::BasicProperties;
use lapin::protocol::basic::{gen_properties, parse_properties};
use libfuzzer_sys::fuzz_target;
use stock_service::broker::headers::{Original, Stamp, copy};

/// So small that an input of a kilobyte reaches its limit.
const FRAME_MAX: u32 = 8_192 + 1_024;

/// What goes around the properties: the frame's own bytes, class, weight and size of the body.
const AROUND: usize = 8 + 12;

fn wire(properties: &BasicProperties) -> Vec<u8> {
    let mut bytes = vec![0; 2 * FRAME_MAX as usize];
    let buffer = Cursor::new(bytes.as_mut_slice());
    let end = gen_properties(properties)(buffer.into()).expect("it can be sent").position;
    bytes.truncate(end as usize);
    bytes
}

fn copied(properties: BasicProperties) -> BasicProperties {
    let original = Original { exchange: "events".into(), routing_key: "key".into(), properties };
    original.retries().ok();
    copy(&original, &Stamp::Retry(1), FRAME_MAX)
}

fuzz_target!(|bytes: &[u8]| {
    let Ok((_, properties)) = parse_properties(bytes) else { return };
    let first = copied(properties);
    let sent = wire(&first);
    assert!(sent.len() + AROUND <= FRAME_MAX as usize, "{} bytes", sent.len());
    let (rest, received) = parse_properties(sent.as_slice()).expect("it can be read");
    assert!(rest.is_empty());
    assert_eq!(wire(&copied(received)), sent);
});
