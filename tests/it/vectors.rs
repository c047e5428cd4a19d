//! The published contract: its vectors, its schemas and the decoder say the same.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::fs;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use expect_test::expect_file;
use jsonschema::Validator;
use lapin::BasicProperties;
use serde::Deserialize;
use serde_json::Value;
use stock_service::message::{Event, Undecodable, decode};

use crate::support::{Order, TestBed};

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/contract");
const MAX_BODY: usize = 1 << 20; // the default of consume.max_body, which the vectors go by

/// A message and its end.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Vector {
    pub name: String,
    pub verdict: Verdict,
    /// `failure-reason`, a colon, `failure-detail`.
    reason: Option<String>,
    content_type: Option<String>,
    content_encoding: Option<String>,
    message_id: Option<String>,
    body: Option<String>,
    body_parts: Option<Vec<Part>>,
    body_base64: Option<String>,
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    Applied,
    Duplicate,
    Failed,
}

/// What would be too long to be written out.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Part {
    Text(String),
    Repeated { repeat: String, times: usize },
}

impl Vector {
    pub fn body(&self) -> Vec<u8> {
        match (&self.body, &self.body_parts, &self.body_base64) {
            (Some(text), None, None) => text.clone().into_bytes(),
            (None, Some(parts), None) => parts.iter().map(Part::text).collect::<String>().into_bytes(),
            (None, None, Some(base64)) => STANDARD.decode(base64).expect(&self.name),
            _ => panic!("{} needs one body", self.name),
        }
    }

    /// The reason for which the decoder refuses it.
    fn refusal(&self) -> Option<String> {
        match decode(&self.body(), self.content_encoding.as_deref(), MAX_BODY) {
            Ok(_) => None,
            Err(undecodable @ Undecodable::Malformed(_)) => Some(format!("malformed: {undecodable}")),
            Err(undecodable @ Undecodable::UnknownEvent(_)) => Some(format!("unknown-event: {undecodable}")),
        }
    }

    fn properties(&self) -> BasicProperties {
        let mut properties = BasicProperties::default();
        if let Some(content_type) = &self.content_type {
            properties = properties.with_content_type(content_type.as_str().into());
        }
        if let Some(encoding) = &self.content_encoding {
            properties = properties.with_content_encoding(encoding.as_str().into());
        }
        if let Some(id) = &self.message_id {
            properties = properties.with_message_id(id.as_str().into());
        }
        properties
    }
}

impl Part {
    fn text(&self) -> String {
        match self {
            Self::Text(text) => text.clone(),
            Self::Repeated { repeat, times } => repeat.repeat(*times),
        }
    }
}

/// Where a schema cannot say what the service does.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Difference {
    difference: String,
    why: String,
    vectors: BTreeSet<String>,
}

pub fn read(file: &str) -> String {
    fs::read_to_string(format!("{FOLDER}/{file}")).unwrap_or_else(|error| panic!("{file}: {error}"))
}

/// All vectors by their topic, which is the file's name.
pub fn topics() -> BTreeMap<String, Vec<Vector>> {
    let folder = fs::read_dir(format!("{FOLDER}/vectors")).expect("a folder");
    let files = folder.map(|file| file.expect("a file").file_name().into_string().expect("UTF-8"));
    files
        .map(|file| {
            let vectors = serde_json::from_str(&read(&format!("vectors/{file}"))).expect(&file);
            (file.trim_end_matches(".json").to_owned(), vectors)
        })
        .collect()
}

fn vectors() -> impl Iterator<Item = Vector> {
    topics().into_values().flatten()
}

fn differences() -> Vec<Difference> {
    serde_json::from_str(&read("differences.json")).expect("JSON")
}

pub fn schema(event_name: &str) -> Value {
    serde_json::from_str(&read(&format!("{event_name}.schema.json"))).expect(event_name)
}

/// The published schemas, by the event's name.
pub fn validators() -> BTreeMap<String, Validator> {
    let validator = |name: &str| jsonschema::draft202012::new(&schema(name)).expect(name);
    Event::NAMES.iter().map(|name| ((*name).to_owned(), validator(name))).collect()
}

/// Whether a body is JSON and valid by the schema of the event that it names.
fn is_valid(validators: &BTreeMap<String, Validator>, body: &[u8]) -> bool {
    let Ok(event) = serde_json::from_slice::<Value>(body) else { return false };
    let validator = event["event_name"].as_str().and_then(|name| validators.get(name));
    validator.is_some_and(|validator| validator.is_valid(&event))
}

#[test]
fn every_vector_is_named_once_and_every_topic_has_some() {
    let mut names = BTreeSet::new();
    for (topic, vectors) in topics() {
        assert!(!vectors.is_empty(), "{topic}");
        for vector in vectors {
            assert_eq!(vector.reason.is_some(), vector.verdict == Verdict::Failed, "{}", vector.name);
            assert!(names.insert(vector.name.clone()), "{} is there twice", vector.name);
        }
    }
    assert!(names.len() > 300, "{} vectors", names.len());
}

#[test]
fn the_decoder_says_what_the_vectors_say_and_why() {
    for vector in vectors() {
        assert_eq!(vector.refusal(), vector.reason, "{}", vector.name);
    }
}

#[test]
fn no_reason_is_long_or_carries_control_characters() {
    for vector in vectors() {
        let reason = vector.reason.unwrap_or_default();
        assert!(reason.len() <= 400, "{}: {reason}", vector.name);
        assert!(!reason.contains(char::is_control), "{}: {reason}", vector.name);
    }
}

#[test]
fn the_schemas_say_what_the_vectors_say_but_for_the_differences_that_are_listed() {
    let validators = validators();
    let mut listed = BTreeSet::new();
    for difference in differences() {
        for name in difference.vectors {
            assert!(listed.insert(name.clone()), "{name} is listed twice");
        }
    }
    let mut found = BTreeSet::new();
    for vector in vectors() {
        if is_valid(&validators, &vector.body()) != (vector.verdict != Verdict::Failed) {
            found.insert(vector.name);
        }
    }
    let unlisted: Vec<_> = found.difference(&listed).collect();
    let obsolete: Vec<_> = listed.difference(&found).collect();
    assert!(unlisted.is_empty(), "the schemas differ: {unlisted:#?}");
    assert!(obsolete.is_empty(), "no differences, or no vectors: {obsolete:#?}");
}

#[test]
fn the_schemas_share_their_grammar_of_ids_and_times() {
    let [placed, changed] = Event::NAMES.map(schema);
    for shared in ["id", "time"] {
        assert_eq!(placed["$defs"][shared], changed["$defs"][shared], "{shared}");
    }
}

#[test]
fn the_table_of_inputs_is_that_of_the_vectors() {
    let cell = |text: &str| text.replace('\\', "\\\\").replace('|', "\\|").replace('<', "\\<").replace('*', "\\*");
    let mut page = "# Every input and its end\n\n\
        Written by `make contract` from [the vectors](vectors), which have the bodies; [the contract](README.md) explains \
        them.\n\
        Ends that are no reason: **applied**, and **duplicate**, which is acknowledged without an effect. All others are \
        in `stock.events.failed`, for this reason.\n"
        .to_owned();
    for (topic, vectors) in topics() {
        write!(page, "\n## {topic}\n\n| input | end |\n| --- | --- |\n").expect("memory");
        for vector in vectors {
            let end = match (vector.verdict, &vector.reason) {
                (Verdict::Applied, _) => "**applied**".to_owned(),
                (Verdict::Duplicate, _) => "**duplicate**".to_owned(),
                (Verdict::Failed, reason) => cell(reason.as_deref().unwrap_or_default()),
            };
            writeln!(page, "| {} | {end} |", cell(&vector.name)).expect("memory");
        }
    }
    page.push_str("\n## What the schemas cannot say\n\n| difference | why | inputs |\n| --- | --- | --- |\n");
    for Difference { difference, why, vectors } in differences() {
        let inputs: Vec<_> = vectors.iter().map(|name| cell(name)).collect();
        writeln!(page, "| {} | {} | {} |", cell(&difference), cell(&why), inputs.join("; ")).expect("memory");
    }
    expect_file!["../../docs/contract/INPUTS.md"].assert_eq(&page);
}

#[tokio::test(flavor = "multi_thread")]
async fn every_vector_ends_as_it_says_when_it_comes_through_the_broker() {
    let bed = TestBed::new().await;
    let vectors: Vec<_> = vectors().collect();
    for vector in &vectors {
        bed.broker.publish_with(Order::EVENT, vector.body(), vector.properties()).await;
    }
    bed.drain().await;
    let of = |verdict: Verdict| vectors.iter().filter(move |vector| vector.verdict == verdict);
    assert_eq!(bed.processed().await, i64::try_from(of(Verdict::Applied).count()).expect("a count"));
    let mut failed = bed.broker.failed(u32::try_from(of(Verdict::Failed).count()).expect("a count")).await;
    for vector in of(Verdict::Failed) {
        let (name, body) = (&vector.name, vector.body());
        let at = failed.iter().position(|message| {
            message.body == body && *message.properties.content_encoding() == *vector.properties().content_encoding()
        });
        let message = failed.swap_remove(at.unwrap_or_else(|| panic!("{name} is changed or missing")));
        let reason = format!("{}: {}", message.text("failure-reason"), message.text("failure-detail"));
        assert_eq!(Some(reason), vector.reason, "{name}");
    }
    bed.finish().await;
}
