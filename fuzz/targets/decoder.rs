//! Any bytes are a message or are refused with a short, printable reason: no panic, and nothing out of range gets in.

#![no_main]

use libfuzzer_sys::fuzz_target;
use stock_service::message::{Event, decode};

fuzz_target!(|body: &[u8]| {
    match decode(body, None, 1 << 20) {
        Ok(message) => {
            assert!(!message.id.as_uuid().is_nil() && !message.id.as_uuid().is_max());
            match message.event {
                Event::OrderPlaced(order) => {
                    assert!((1..=10_000).contains(&order.lines.len()));
                    for line in order.lines {
                        assert!((1..=999_999_999_999).contains(&line.quantity.thousandths()));
                    }
                }
                Event::OrderStatusChanged(change) => {
                    assert!(change.version >= 1);
                    assert!((1..=64).contains(&change.status.chars().count()));
                    assert!(!change.status.contains('\0'));
                }
            }
        }
        Err(reason) => {
            let reason = reason.to_string();
            assert!(reason.len() <= 2_000, "{} bytes", reason.len());
            assert!(!reason.contains(|c: char| c.is_control()), "{reason:?}");
        }
    }
});
