//! The producers of `examples/producers`, each with the client library of its language.

use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};

use lapin::types::{AMQPType, AMQPValue};
use serde_json::Value;
use tokio::io::AsyncWriteExt;
use tokio::process::Command;
use uuid::Uuid;

use crate::support::{self, Message, Order, PATIENCE, Scripted, Step, TestBed};

/// Tests of one producer, and the types of headers that its client sends.
macro_rules! producer {
    ($language:ident, $needs:literal, $types:expr) => {
        mod $language {
            use super::*;

            const PRODUCER: Producer = Producer(stringify!($language));

            #[tokio::test(flavor = "multi_thread")]
            #[ignore = $needs]
            async fn its_orders_are_reserved_as_sent_and_once_however_often_they_are_relayed() {
                orders_are_reserved_once(&PRODUCER).await;
            }

            #[tokio::test(flavor = "multi_thread")]
            #[ignore = $needs]
            async fn an_event_that_no_queue_takes_is_not_marked_as_published() {
                unrouted_is_not_marked(&PRODUCER).await;
            }

            #[tokio::test(flavor = "multi_thread")]
            #[ignore = $needs]
            async fn an_event_that_the_broker_refuses_is_not_marked_and_relayed_again() {
                refused_is_relayed_again(&PRODUCER).await;
            }

            #[tokio::test(flavor = "multi_thread")]
            #[ignore = $needs]
            async fn its_mistakes_are_parked_as_sent_with_the_reason_that_it_expects() {
                mistakes_are_parked(&PRODUCER, &$types).await;
            }

            #[tokio::test(flavor = "multi_thread")]
            #[ignore = $needs]
            async fn its_own_client_reads_a_copy_after_retries_as_it_reads_the_original() {
                copy_reads_as_the_original(&PRODUCER).await;
            }
        }
    };
}

use AMQPType::{
    Boolean, ByteArray, DecimalValue, Double, FieldTable, LongInt, LongLongInt, LongString, ShortInt, ShortShortInt,
    Timestamp,
};

producer!(
    python,
    "needs pika: `make producers` runs it",
    [LongString, LongInt, LongLongInt, Boolean, DecimalValue, Timestamp, ByteArray, FieldTable]
);
producer!(
    node,
    "needs amqplib: `make producers` runs it",
    [
        LongString,
        ShortShortInt,
        ShortInt,
        LongInt,
        LongLongInt,
        Boolean,
        Double,
        DecimalValue,
        Timestamp,
        ByteArray,
        FieldTable
    ]
);
producer!(
    php,
    "needs php-amqplib: `make producers` runs it",
    [LongString, LongInt, LongLongInt, Boolean, DecimalValue, Timestamp, FieldTable]
);
producer!(
    symfony,
    "needs Symfony Messenger: `make producers` runs it",
    [LongString, LongLongInt, Boolean, Double, DecimalValue, Timestamp, FieldTable]
);

/// A producer, by its folder.
struct Producer(&'static str);

impl Producer {
    /// Runs a command of the producer, and gives what it prints.
    async fn run(&self, bed: &TestBed, arguments: &[&str], input: &str) -> String {
        let output = self.output(bed, arguments, input).await;
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && said.is_empty(), "{} {arguments:?}: {said}", self.0);
        String::from_utf8(output.stdout).expect("UTF-8")
    }

    async fn output(&self, bed: &TestBed, arguments: &[&str], input: &str) -> Output {
        let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/producers").join(self.0);
        let installed = std::env::var("STOCK_TEST_PRODUCERS").expect("what scripts/producers installs; it runs this");
        let installed = PathBuf::from(installed).join(self.0);
        let (runtime, script) = match self.0 {
            "python" => (installed.join("bin/python"), sources.join("producer.py")),
            "node" => ("node".into(), installed.join("producer.js")),
            _ => ("php".into(), sources.join("producer.php")),
        };
        let mut child = Command::new(runtime)
            .arg(script)
            .args(arguments)
            .env("AMQP_URL", bed.variable("AMQP_URL"))
            .env("EXCHANGE", bed.broker.exchange())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .expect(self.0);
        // Few rows: they fit the pipe.
        let mut stdin = child.stdin.take().expect("a pipe");
        stdin.write_all(input.as_bytes()).await.expect("a reader");
        drop(stdin);
        tokio::time::timeout(PATIENCE, child.wait_with_output()).await.expect("an end").expect("a child")
    }

    /// Publishes these rows of the outbox.
    async fn relay(&self, bed: &TestBed, rows: &str) {
        let marked = self.run(bed, &["relay"], rows).await;
        let ids: Vec<_> = rows.lines().map(|row| json(row)["event_id"].clone()).collect();
        assert_eq!(marked.lines().collect::<Vec<_>>(), ids, "each row is marked as published");
        bed.broker.also_published(rows.lines());
    }

    /// Publishes two rows, of which the broker does not take the second.
    async fn relays_first_only(&self, bed: &TestBed, first: &str, second: &str) {
        let relayed = self.output(bed, &["relay"], &format!("{first}\n{second}")).await;
        assert!(!relayed.status.success(), "{relayed:?}");
        let marked = String::from_utf8_lossy(&relayed.stdout);
        // PHP prints its last words there, too.
        assert_eq!(marked.lines().next(), json(first)["event_id"].as_str());
        assert!(!marked.contains(text(&json(second)["event_id"])), "{marked}");
    }

    /// Takes a message out of a queue, as the producer's client sees it.
    async fn read(&self, bed: &TestBed, queue: &str) -> Value {
        json(&self.run(bed, &["read", queue], "").await)
    }
}

/// A queue of the test's own that gets every order, too: it keeps the messages as the producer sent them.
async fn witness(bed: &TestBed) -> String {
    let queue = bed.broker.own_queue("witness");
    bed.broker.declare(&queue, &[]).await;
    bed.broker.bind(&queue, Order::EVENT).await;
    queue
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_else(|| panic!("{value} is no string"))
}

async fn orders_are_reserved_once(producer: &Producer) {
    let bed = TestBed::new().await;
    let witness = witness(&bed).await;
    let rows = producer.run(&bed, &["orders", "5"], "").await;
    for _ in 0..2 {
        producer.relay(&bed, &rows).await;
        bed.drain().await;
    }
    assert_eq!((bed.processed().await, bed.reservations().await), (5, 15));
    let sent = bed.broker.overhear(&witness).await;
    assert_eq!(sent.len(), 10);
    for row in rows.lines() {
        let event = json(row);
        for line in event["payload"]["lines"].as_array().expect("lines") {
            let reserved = sqlx::query_scalar::<_, i64>(
                "select count(*) from reservation
                 where order_id = $1::uuid and product_id = $2::uuid and quantity = $3::numeric",
            );
            let reserved = reserved.bind(text(&event["payload"]["orderId"])).bind(text(&line["productId"]));
            let reserved = reserved.bind(text(&line["quantity"])).fetch_one(&bed.pool).await.expect("a count");
            assert_eq!(reserved, 1, "{line}");
        }
        let id = text(&event["event_id"]);
        assert_eq!(Uuid::parse_str(id).expect("a UUID").get_version_num(), 7, "{id}");
        let occurred_at = text(&event["occurred_at"]);
        assert!(occurred_at.ends_with('Z') || occurred_at.ends_with("+00:00"), "{occurred_at}");
        let copies: Vec<_> = sent.iter().filter(|message| message.body == row.as_bytes()).collect();
        assert_eq!(copies.len(), 2, "the row, byte for byte: {row}");
        for Message { properties, .. } in copies {
            assert_eq!(properties.delivery_mode(), &Some(2));
            assert_eq!(properties.content_type(), &Some("application/json".into()));
            assert_eq!(properties.message_id(), &Some(id.into()));
        }
    }
    bed.finish().await;
}

async fn unrouted_is_not_marked(producer: &Producer) {
    let bed = TestBed::new().await;
    let rows = producer.run(&bed, &["orders", "2"], "").await;
    let (first, second) = rows.split_once('\n').expect("two rows");
    let unrouted = second.replace(Order::EVENT, "order.order.unheard.v1");
    producer.relays_first_only(&bed, first, &unrouted).await;
    bed.broker.also_published([first]);
    bed.drain().await;
    assert_eq!(bed.processed().await, 1);
    bed.finish().await;
}

async fn refused_is_relayed_again(producer: &Producer) {
    let bed = TestBed::new().await;
    let full = bed.broker.own_queue("full");
    let limits = [("x-max-length", AMQPValue::LongInt(1)), ("x-overflow", support::text("reject-publish"))];
    bed.broker.declare(&full, &limits).await;
    bed.broker.bind(&full, Order::EVENT).await;
    let rows = producer.run(&bed, &["orders", "2"], "").await;
    let (first, second) = rows.split_once('\n').expect("two rows");
    producer.relays_first_only(&bed, first, second).await;
    // The service's queue has taken the second one, too; the producer cannot know.
    bed.broker.also_published(rows.lines());
    bed.broker.delete(&full).await;
    producer.relay(&bed, second).await;
    bed.drain().await;
    assert_eq!((bed.processed().await, bed.reservations().await), (2, 6));
    bed.finish().await;
}

async fn mistakes_are_parked(producer: &Producer, types: &[AMQPType]) {
    let bed = TestBed::new().await;
    let witness = witness(&bed).await;
    let printed = producer.run(&bed, &["broken"], "").await;
    let mistakes: Vec<_> = printed.lines().map(json).collect();
    assert!(mistakes.len() > 1, "{printed}");
    bed.broker.also_published(mistakes.iter().map(|mistake| text(&mistake["body"])));
    let sent = bed.broker.overhear(&witness).await;
    let innocents = Order::many(10);
    bed.broker.publish_all(Order::EVENT, innocents.iter().map(Order::body)).await;
    bed.drain().await;
    assert_eq!(bed.processed().await, 10, "only the innocent ones");
    let failed = bed.broker.failed(u32::try_from(mistakes.len()).expect("a count")).await;
    for mistake in &mistakes {
        let is_it = |message: &&Message| message.body == text(&mistake["body"]).as_bytes();
        let (original, copy) = (sent.iter().find(is_it), failed.iter().find(is_it));
        let (original, copy) = (original.expect("it was sent"), copy.expect("it is in the failure queue"));
        assert_eq!(copy.text("failure-reason"), "malformed");
        let detail = copy.text("failure-detail");
        assert!(detail.starts_with(&format!("{}: ", text(&mistake["place"]))), "{detail}, but {mistake}");
        assert!(detail.contains(text(&mistake["rule"])), "{detail}, but {mistake}");
        assert_eq!(copy.number("failed-attempts"), 1);
        assert_is_copy(original, copy);
        let headers = original.properties.headers().clone().expect("headers");
        let sent_types: Vec<_> = headers.inner().values().map(|value| value.get_type()).collect();
        for sent in types {
            assert!(sent_types.contains(sent), "no header is a {sent:?}: {headers:?}");
        }
    }
    bed.finish().await;
}

/// All properties, and all headers with their types, are those of the original; only ours are added.
fn assert_is_copy(original: &Message, copy: &Message) {
    let theirs = original.properties.headers().clone().expect("headers");
    assert_eq!(copy.properties.clone().with_headers(theirs.clone()), original.properties);
    for (name, value) in theirs.inner() {
        assert_eq!(copy.header(name.as_str()), Some(value), "{name}");
    }
    let mut added = copy.header_names();
    added.retain(|name| !theirs.contains_key(name));
    let ours = ["failed-at", "failed-attempts", "failure-detail", "failure-reason"];
    assert_eq!(added, [&ours[..], &["original-exchange", "original-routing-key"]].concat());
}

async fn copy_reads_as_the_original(producer: &Producer) {
    let mut bed = TestBed::new().await;
    bed.set_ladder(2, 20);
    let witness = witness(&bed).await;
    let rows = producer.run(&bed, &["orders", "1"], "").await;
    producer.relay(&bed, &rows).await;
    let service = bed.start_with(Scripted::new(|_, _| Step::Fail)).await;
    bed.broker.has(&bed.broker.failure_queue(), 1).await;
    service.stop().await;
    let original = producer.read(&bed, &witness).await;
    let copy = producer.read(&bed, &bed.broker.failure_queue()).await;
    bed.broker.account_for(1);
    assert_eq!(original["body"], *rows.trim_end());
    assert_eq!((&copy["properties"], &copy["body"]), (&original["properties"], &original["body"]));
    assert_eq!(copy["headers"]["failure-reason"], "retries-exhausted");
    for (name, value) in original["headers"].as_object().expect("headers") {
        assert_eq!(&copy["headers"][name], value, "{name}");
    }
    bed.finish().await;
}
