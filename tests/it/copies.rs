//! A copy of a message says what the original said, and does nothing that the original did already.

use lapin::BasicProperties;
use lapin::options::BasicConsumeOptions;
use lapin::types::{AMQPValue, DecimalValue, FieldArray, FieldTable, LongString};

use crate::support::{Message, Order, Scripted, Step, TestBed, persistent, table, text, with_headers};

const HOUR: u32 = 3_600_000;

/// The copy in the retry queue and, after the last retry, the one in the failure queue.
async fn both_copies(properties: BasicProperties, body: &str) -> (TestBed, Message, Message) {
    let mut bed = TestBed::new().await;
    bed.set_ladder(1, HOUR);
    bed.broker.publish_with(Order::EVENT, body, properties).await;
    let script = Scripted::new(|_, _| Step::Fail);
    bed.drain_with(script.clone()).await;
    let retry = bed.broker.take(&bed.broker.retry_queue(HOUR)).await.pop().expect("a retry copy");
    bed.broker.send_to(&bed.broker.queue(), &retry).await;
    bed.drain_with(script).await;
    let failed = bed.broker.failed(1).await.pop().expect("a failure copy");
    (bed, retry, failed)
}

/// One header of each type that the client can send.
fn headers_of_all_types() -> Vec<(&'static str, AMQPValue)> {
    let nested = table(&[("deep", AMQPValue::FieldTable(table(&[("er", AMQPValue::LongInt(7))])))]);
    let mixed = vec![AMQPValue::Boolean(false), text("x"), AMQPValue::LongLongInt(-1)];
    vec![
        ("traceparent", text("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")),
        ("x-tenant", text("a")),
        ("bytes", AMQPValue::LongString(LongString::from(&b"\xff\x00\xfe"[..]))),
        ("blob", AMQPValue::ByteArray(b"\x00\x01\xff".as_slice().into())),
        ("yes", AMQPValue::Boolean(true)),
        ("i8", AMQPValue::ShortShortInt(-8)),
        ("u8", AMQPValue::ShortShortUInt(8)),
        ("i16", AMQPValue::ShortInt(-16)),
        ("u16", AMQPValue::ShortUInt(16)),
        ("i32", AMQPValue::LongInt(-32)),
        ("u32", AMQPValue::LongUInt(32)),
        ("i64", AMQPValue::LongLongInt(i64::MIN)),
        ("float", AMQPValue::Float(0.5)),
        ("double", AMQPValue::Double(-0.25)),
        ("decimal", AMQPValue::DecimalValue(DecimalValue { scale: 2, value: 314 })),
        ("time", AMQPValue::Timestamp(1_700_000_000)),
        ("nothing", AMQPValue::Void),
        ("table", AMQPValue::FieldTable(nested)),
        ("array", AMQPValue::FieldArray(FieldArray::from(mixed))),
        ("", text("an empty name")),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_keeps_body_properties_and_headers_with_their_types() {
    let headers = headers_of_all_types();
    let properties = BasicProperties::default()
        .with_headers(table(&headers))
        .with_content_type("application/vnd.shop+json".into())
        .with_content_encoding("UTF-8".into())
        .with_priority(7)
        .with_correlation_id("correlation".into())
        .with_reply_to("client.queue".into())
        .with_message_id("message".into())
        .with_timestamp(1_700_000_000)
        .with_type("type".into())
        .with_app_id("relay".into());
    let order = Order::new(1);
    let body = order.body().replacen('{', " {\t\"\\u0078\": [1.0,  1e2, \"\\u00e9é\"],", 1) + "\n ";
    let (bed, retry, failed) = both_copies(properties.clone(), &body).await;
    for (copy, which) in [(&retry, "retry"), (&failed, "failure")] {
        assert_eq!(String::from_utf8_lossy(&copy.body), body, "{which}");
        for (name, value) in &headers {
            assert_eq!(copy.header(name), Some(value), "{which}: {name:?}");
        }
        let (ours, theirs) = (&copy.properties, &properties);
        assert_eq!(ours.content_type(), theirs.content_type(), "{which}");
        assert_eq!(ours.content_encoding(), theirs.content_encoding(), "{which}");
        assert_eq!(ours.priority(), theirs.priority(), "{which}");
        assert_eq!(ours.correlation_id(), theirs.correlation_id(), "{which}");
        assert_eq!(ours.reply_to(), theirs.reply_to(), "{which}");
        assert_eq!(ours.message_id(), theirs.message_id(), "{which}");
        assert_eq!(ours.timestamp(), theirs.timestamp(), "{which}");
        assert_eq!(ours.kind(), theirs.kind(), "{which}");
        assert_eq!(ours.app_id(), theirs.app_id(), "{which}");
        assert_eq!(copy.text("original-exchange"), bed.broker.exchange(), "{which}");
        assert_eq!(copy.text("original-routing-key"), Order::EVENT, "{which}");
    }
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_of_a_message_without_properties_has_only_ours() {
    let (bed, retry, failed) = both_copies(BasicProperties::default(), &Order::new(1).body()).await;
    for copy in [&retry, &failed] {
        let properties = copy.properties.clone().with_headers(FieldTable::default());
        assert_eq!(properties, persistent().with_headers(FieldTable::default()), "nothing is made up");
    }
    assert_eq!(retry.header_names(), ["original-exchange", "original-routing-key", "retry-count"]);
    assert_eq!(
        failed.header_names(),
        [
            "failed-at",
            "failed-attempts",
            "failure-detail",
            "failure-reason",
            "original-exchange",
            "original-routing-key"
        ]
    );
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_is_persistent_whatever_the_original_was() {
    for mode in [None, Some(1), Some(2)] {
        let properties = match mode {
            Some(mode) => BasicProperties::default().with_delivery_mode(mode),
            None => BasicProperties::default(),
        };
        let (bed, retry, failed) = both_copies(properties, &Order::new(1).body()).await;
        assert_eq!(retry.properties.delivery_mode(), &Some(2), "{mode:?}");
        assert_eq!(failed.properties.delivery_mode(), &Some(2), "{mode:?}");
        bed.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_would_act_a_second_time_does_not_and_is_still_told() {
    let mut bed = TestBed::new().await;
    bed.set_ladder(2, 20);
    let (carbon, blind) = (bed.broker.own_queue("carbon"), bed.broker.own_queue("blind"));
    for queue in [&carbon, &blind] {
        bed.broker.declare(queue, &[]).await;
        bed.broker.bind(queue, queue).await;
    }
    let address = |queue: &str| AMQPValue::FieldArray(FieldArray::from(vec![text(queue)]));
    let user = url::Url::parse(bed.variable("AMQP_URL")).expect("a URL").username().to_owned();
    let properties = with_headers(&[("CC", address(&carbon)), ("BCC", address(&blind))])
        .with_expiration("3600000".into())
        .with_user_id(user.as_str().into());
    let service = bed.start_with(Scripted::new(|_, _| Step::Fail)).await;
    bed.broker.publish_with(Order::EVENT, Order::new(1).body(), properties).await;
    let failed = bed.broker.failed(1).await.pop().expect("a failure copy");
    service.stop().await;
    assert_eq!((bed.broker.depth(&carbon).await, bed.broker.depth(&blind).await), (1, 1), "the original's own");
    assert_eq!(failed.header("CC"), None);
    assert_eq!(failed.header("BCC"), None);
    assert_eq!(failed.properties.expiration(), &None);
    assert_eq!(failed.properties.user_id(), &None);
    let kept: Vec<_> = failed.properties.headers().iter().flat_map(|headers| headers.inner().values()).collect();
    for value in [address(&carbon), text("3600000"), text(&user)] {
        assert!(kept.contains(&&value), "{value:?} is not kept under another name");
    }
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_for_a_direct_reply_is_copied_without_it() {
    let mut bed = TestBed::new().await;
    bed.set_ladder(1, 20);
    const REPLIES: &str = "amq.rabbitmq.reply-to";
    let channel = bed.broker.connection().await.create_channel().await.expect("a channel");
    let no_ack = BasicConsumeOptions { no_ack: true, ..BasicConsumeOptions::default() };
    let replies = channel.basic_consume(REPLIES.into(), "".into(), no_ack, FieldTable::default()).await;
    let service = bed.start_with(Scripted::new(|_, _| Step::Fail)).await;
    let innocents = Order::many(3);
    let request = persistent().with_reply_to(REPLIES.into());
    bed.broker.send_on(&channel, &bed.broker.exchange(), Order::EVENT, Order::new(1).body().as_bytes(), request).await;
    let failed = bed.broker.failed(1).await.pop().expect("a failure copy");
    assert_eq!(failed.properties.reply_to(), &None);
    let kept = failed.properties.headers().iter().flat_map(|headers| headers.inner().values()).any(
        |value| matches!(value, AMQPValue::LongString(text) if String::from_utf8_lossy(text.as_bytes()).starts_with(REPLIES)),
    );
    assert!(kept, "{:?}", failed.properties);
    drop(replies);
    service.stop().await;
    bed.broker.publish_all(Order::EVENT, innocents.iter().map(Order::body)).await;
    bed.drain().await;
    assert_eq!(bed.processed().await, 3);
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_brokers_own_headers_are_not_sent_again_and_others_are() {
    let death = AMQPValue::FieldArray(FieldArray::from(vec![AMQPValue::FieldTable(table(&[
        ("queue", text("elsewhere")),
        ("reason", text("expired")),
        ("count", AMQPValue::LongLongInt(9)),
    ]))]));
    let theirs = [
        ("x-death", death),
        ("x-first-death-exchange", text("e")),
        ("x-first-death-queue", text("q")),
        ("x-first-death-reason", text("expired")),
        ("x-last-death-exchange", text("e")),
        ("x-last-death-queue", text("q")),
        ("x-last-death-reason", text("expired")),
    ];
    let counts = ["x-delivery-count", "x-acquired-count"].map(|name| (name, AMQPValue::LongLongInt(99)));
    let ours = [("x-request-id", text("kept")), ("tenant", text("kept"))];
    let all: Vec<_> = theirs.iter().chain(&counts).chain(&ours).cloned().collect();
    let (bed, retry, failed) = both_copies(with_headers(&all), &Order::new(1).body()).await;
    for copy in [&retry, &failed] {
        for (name, _) in &theirs {
            assert_eq!(copy.header(name), None, "{name}");
        }
        for (name, forged) in &counts {
            assert_ne!(copy.header(name), Some(forged), "{name}"); // the broker writes its own
        }
        for (name, value) in &ours {
            assert_eq!(copy.header(name), Some(value), "{name}");
        }
    }
    bed.finish().await;
}

/// What docs/COPIES.md says of foreign headers: each name, and where its value is in a copy.
pub fn decisions() -> Vec<(String, Option<String>)> {
    let document = include_str!("../../docs/COPIES.md");
    let quoted = |cell: &str| cell.split('`').skip(1).step_by(2).map(str::to_owned).collect::<Vec<_>>();
    let headers = document.split("## Headers").nth(1).and_then(|rest| rest.split("\n## ").next()).expect("a table");
    let mut decisions = Vec::new();
    for row in headers.lines().filter(|line| line.starts_with("| `")) {
        let cells: Vec<_> = row.split('|').map(str::trim).collect();
        let (names, by, becomes) = (quoted(cells[1]), cells[2], cells[3]);
        if by == "this service" {
            continue;
        }
        let kept_as: Vec<_> = match becomes {
            "kept" => names.iter().cloned().map(Some).collect(),
            "dropped" => vec![None; names.len()],
            renamed => quoted(renamed).into_iter().map(Some).collect(),
        };
        assert_eq!(names.len(), kept_as.len(), "{row}");
        // `x-jms-…` stands for many; the broker removes BCC before delivery.
        decisions.extend(names.into_iter().zip(kept_as).filter(|(name, _)| !name.ends_with('…') && name != "BCC"));
    }
    decisions
}

#[tokio::test(flavor = "multi_thread")]
async fn the_document_says_what_becomes_of_each_header() {
    let decisions = decisions();
    assert!(decisions.len() > 50, "the document has lost its table: {decisions:?}");
    // An array of text is what CC must be; the broker looks at nothing else.
    let value = AMQPValue::FieldArray(FieldArray::from(vec![text("told")]));
    let headers: Vec<_> = decisions.iter().map(|(name, _)| (name.as_str(), value.clone())).collect();
    let (bed, retry, failed) = both_copies(with_headers(&headers), &Order::new(1).body()).await;
    for (copy, which) in [(&retry, "retry"), (&failed, "failure")] {
        for (name, kept_as) in &decisions {
            if let Some(kept_as) = kept_as {
                assert_eq!(copy.header(kept_as), Some(&value), "{which}: {name} as {kept_as}");
            }
            if kept_as.as_ref() != Some(name) {
                assert_ne!(copy.header(name), Some(&value), "{which}: {name} acts a second time");
            }
        }
    }
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hundred_headers_survive_all_retries() {
    let headers: Vec<_> = (0..100).map(|n| (format!("header-{n}"), text(&"v".repeat(600)))).collect();
    let headers: Vec<_> = headers.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
    let (bed, _, failed) = both_copies(with_headers(&headers), &Order::new(1).body()).await;
    for (name, value) in &headers {
        assert_eq!(failed.header(name), Some(value), "{name}");
    }
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn headers_that_fill_a_frame_lose_the_largest_ones_and_say_so() {
    let headers = [
        ("small", text("kept")),
        ("largest", text(&"a".repeat(100_000))),
        ("large", text(&"b".repeat(30_700))), // together with the largest just below the frame of 131,072 bytes
    ];
    let (bed, retry, failed) = both_copies(with_headers(&headers), &Order::new(1).body()).await;
    for copy in [&retry, &failed] {
        assert_eq!(copy.header("small"), Some(&text("kept")));
        assert_eq!(copy.header("large"), Some(&headers[2].1));
        assert_eq!(copy.header("largest"), None);
        let named = copy
            .properties
            .headers()
            .iter()
            .flat_map(|headers| headers.inner().values())
            .any(|value| matches!(value, AMQPValue::LongString(text) if text.as_bytes() == b"largest"));
        assert!(named, "the dropped header is named");
    }
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_of_any_size_is_copied_whole() {
    let mut bed = TestBed::new().await;
    bed.set_ladder(1, 20);
    bed.set("consume.max_body", "16MiB");
    let sizes = [1_000, 4_096, 131_060, 131_064, 131_080, 262_128, 1_000_000, 10_000_000];
    let bodies: Vec<_> = sizes
        .iter()
        .map(|size| {
            let order = Order::new(1).body();
            order.replacen('{', &format!("{{\"pad\":\"{}\",", "p".repeat(size - order.len() - 9)), 1)
        })
        .collect();
    let service = bed.start_with(Scripted::new(|_, _| Step::Fail)).await;
    bed.broker.publish_all(Order::EVENT, bodies.clone()).await;
    let failed = bed.broker.failed(8).await;
    service.stop().await;
    for (body, size) in bodies.iter().zip(sizes) {
        assert_eq!(body.len(), size);
        assert!(failed.iter().any(|copy| copy.body == body.as_bytes()), "{size} bytes");
    }
    bed.finish().await;
}
