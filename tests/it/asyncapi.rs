//! The `AsyncAPI` document says what the sources say.

use std::collections::BTreeSet;

use serde_json::Value;
use stock_service::message::{Event, Reason, decode};

use crate::vectors::{read, schema, validators};

fn document() -> Value {
    serde_saphyr::from_str(&read("asyncapi.yaml")).expect("YAML")
}

/// All references in a value.
fn references(value: &Value) -> Vec<&str> {
    match value {
        Value::Array(values) => values.iter().flat_map(references).collect(),
        Value::Object(fields) => match fields.get("$ref") {
            Some(reference) => vec![reference.as_str().expect("a reference")],
            None => fields.values().flat_map(references).collect(),
        },
        _ => Vec::new(),
    }
}

/// The value that a reference within the document stands for.
fn resolved<'d>(document: &'d Value, value: &'d Value) -> &'d Value {
    match value.get("$ref").and_then(Value::as_str) {
        Some(reference) => {
            let pointer = reference.strip_prefix('#').expect(reference);
            resolved(document, document.pointer(pointer).expect(reference))
        }
        None => value,
    }
}

fn keys(value: &Value) -> BTreeSet<&str> {
    value.as_object().expect("an object").keys().map(String::as_str).collect()
}

#[test]
fn every_reference_leads_somewhere() {
    let document = document();
    let references = references(&document);
    assert!(references.len() > 10, "{references:?}");
    for reference in references {
        match reference.split_once('#') {
            Some(("", pointer)) => assert!(document.pointer(pointer).is_some(), "{reference}"),
            Some(_) => panic!("{reference} points into another file"),
            None => drop(serde_json::from_str::<Value>(&read(reference)).expect(reference)),
        }
    }
}

#[test]
fn the_channels_of_the_exchange_are_the_events_with_a_handler() {
    let document = document();
    let mut addresses = BTreeSet::new();
    for channel in document["channels"].as_object().expect("channels").values() {
        let binding = &resolved(&document, &channel["bindings"])["amqp"];
        if binding["is"] == "routingKey" {
            assert_eq!(
                (&binding["exchange"]["name"], &binding["exchange"]["type"]),
                (&"events".into(), &"topic".into())
            );
            addresses.insert(channel["address"].as_str().expect("an address"));
        }
    }
    assert_eq!(addresses, BTreeSet::from(Event::NAMES));
}

#[test]
fn each_message_has_the_published_schema_and_examples_that_are_valid() {
    let (document, validators) = (document(), validators());
    let messages = document["components"]["messages"].as_object().expect("messages");
    let events: Vec<_> = messages.values().filter(|message| message["payload"].get("$ref").is_some()).collect();
    assert_eq!(events.len(), Event::NAMES.len());
    for message in events {
        let name = message["name"].as_str().expect("a name");
        assert_eq!(message["payload"]["$ref"], format!("./{name}.schema.json"));
        let examples = message["examples"].as_array().expect("examples");
        assert!(!examples.is_empty(), "{name}");
        for example in examples {
            let payload = &example["payload"];
            assert!(validators[name].is_valid(payload), "{payload}");
            let read = decode(payload.to_string().as_bytes(), None, 1 << 20).expect("an event");
            assert_eq!(read.event.name(), name);
        }
        assert!(
            schema(name)["examples"].as_array().expect("examples").iter().all(|event| validators[name].is_valid(event))
        );
    }
}

#[test]
fn the_example_of_a_failed_message_has_the_reason_that_the_decoder_gives() {
    let document = document();
    let example = &document["components"]["messages"]["failed"]["examples"][0];
    let refused = decode(example["payload"].to_string().as_bytes(), None, 1 << 20).expect_err("a failed message");
    assert_eq!(example["headers"]["failure-detail"], refused.to_string());
    let headers = &document["components"]["schemas"]["failureHeaders"];
    let validator = jsonschema::draft202012::new(headers).expect("a schema");
    assert!(validator.is_valid(&example["headers"]));
}

#[test]
fn the_headers_are_those_that_the_service_writes() {
    let document = document();
    let schemas = &document["components"]["schemas"];
    let mut documented = keys(&schemas["producerHeaders"]["properties"]);
    documented.extend(keys(&schemas["failureHeaders"]["properties"]));
    // A name of ours has hyphens, small letters, and no x- in front.
    let source = include_str!("../../src/broker/headers.rs");
    let code: Vec<_> = source.lines().take_while(|line| *line != "#[cfg(test)]").collect();
    let texts = code
        .iter()
        .filter(|line| !line.trim_start().starts_with("//"))
        .flat_map(|line| line.split('"').skip(1).step_by(2));
    let is_ours = |text: &&str| {
        text.contains('-')
            && text.starts_with(|first: char| first.is_ascii_lowercase())
            && !text.starts_with("x-")
            && text.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'-')
    };
    assert_eq!(documented, texts.filter(is_ours).collect());
}

#[test]
fn the_reasons_are_those_that_there_are() {
    let document = document();
    let documented = &document["components"]["schemas"]["failureHeaders"]["properties"]["failure-reason"]["enum"];
    assert_eq!(*documented, Value::from(Reason::ALL.map(Reason::as_str).to_vec()));
}
