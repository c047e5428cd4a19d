//! The manifests in `deploy/kubernetes` fit the service, and one another. `make deploy-check` holds them against the schemas.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use stock_service::settings::{DEFAULTS, Settings};

use crate::support::{Endpoint, Process, id};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/kubernetes")
}

/// The objects of one file.
fn objects(file: &str) -> Vec<Value> {
    let text = std::fs::read_to_string(folder().join(file)).expect(file);
    serde_saphyr::from_multiple(&text).expect(file)
}

/// The only object of a file.
fn object(file: &str) -> Value {
    let [object] = <[Value; 1]>::try_from(objects(file)).expect("one object");
    object
}

/// What the pods of a file are made from.
fn pod(file: &str) -> Value {
    let object = object(file);
    let pod = ["/spec/jobTemplate/spec/template", "/spec/template"].iter().find_map(|path| object.pointer(path));
    pod.expect("a template").clone()
}

fn container(file: &str) -> Value {
    let pod = pod(file);
    let [container] = &pod["spec"]["containers"].as_array().expect("containers")[..] else { panic!("{file}: not one") };
    container.clone()
}

fn texts(value: &Value) -> Vec<&str> {
    value.as_array().expect("a list").iter().map(|text| text.as_str().expect("a text")).collect()
}

/// Default of a setting.
fn default(key: &str) -> String {
    let defaults = DEFAULTS.parse::<toml::Table>().expect("TOML");
    let (section, name) = key.split_once('.').expect("a section");
    defaults[section][name].as_str().expect("a text").to_owned()
}

const PODS: [&str; 3] = ["deployment.yaml", "migrate.yaml", "purge.yaml"];

#[test]
fn each_manifest_is_in_the_kustomization_or_names_what_it_needs() {
    let mut listed: BTreeSet<_> =
        texts(&object("kustomization.yaml")["resources"]).iter().map(ToString::to_string).collect();
    listed.extend(["kustomization.yaml", "secret.example.yaml", "scaled-object.yaml"].map(str::to_owned));
    let files = std::fs::read_dir(folder()).expect("a folder");
    let files: BTreeSet<_> =
        files.map(|file| file.expect("a file").file_name().into_string().expect("UTF-8")).collect();
    assert_eq!(files, listed);
}

#[test]
fn all_pods_run_this_release_of_the_image() {
    let kustomization = object("kustomization.yaml");
    let [image] = &kustomization["images"].as_array().expect("images")[..] else { panic!("one image") };
    assert_eq!((&image["name"], &image["newTag"]), (&json!("stock-service"), &json!(env!("CARGO_PKG_VERSION"))));
    for file in PODS {
        assert_eq!(container(file)["image"], image["name"], "{file}");
    }
}

#[test]
fn the_image_has_the_user_the_port_and_the_entry_point_that_the_pods_count_on() {
    let image = include_str!("../../Dockerfile");
    let user = &pod("deployment.yaml")["spec"]["securityContext"];
    let port = &container("deployment.yaml")["ports"][0]["containerPort"];
    for line in [
        format!("USER {}:{}\n", user["runAsUser"], user["runAsGroup"]),
        format!("STOCK__HTTP__LISTEN=0.0.0.0:{port} "),
        "ENTRYPOINT [\"stock-service\"]\n".to_owned(),
    ] {
        assert!(image.contains(&line), "{line}");
    }
}

#[test]
fn each_pod_runs_without_rights() {
    for file in PODS {
        let (pod, container) = (pod(file), container(file));
        let spec = &pod["spec"];
        assert_eq!(spec["automountServiceAccountToken"], false, "{file}");
        let expected = json!({
            "runAsNonRoot": true, "runAsUser": 65532, "runAsGroup": 65532, "fsGroup": 65532,
            "seccompProfile": {"type": "RuntimeDefault"},
        });
        assert_eq!(spec["securityContext"], expected, "{file}");
        let expected = json!({
            "allowPrivilegeEscalation": false, "readOnlyRootFilesystem": true, "capabilities": {"drop": ["ALL"]},
        });
        assert_eq!(container["securityContext"], expected, "{file}");
        assert!(container["resources"]["limits"]["memory"].is_string(), "{file}");
    }
}

/// The settings that the pods have, with the secrets of the example where they are mounted; and where that is.
fn environment() -> (Vec<(String, String)>, PathBuf) {
    let files = std::env::temp_dir().join(format!("stock-service-secrets-{}", id()));
    std::fs::create_dir(&files).expect("a folder");
    for (key, value) in object("secret.example.yaml")["stringData"].as_object().expect("secrets") {
        std::fs::write(files.join(key), value.as_str().expect("a text")).expect("a file");
    }
    let mounted = container("deployment.yaml")["volumeMounts"][0]["mountPath"].as_str().expect("a path").to_owned();
    let settings = object("settings.yaml");
    let settings = settings["data"].as_object().expect("settings").iter().map(|(name, value)| {
        let value = value.as_str().expect("a text");
        (name.clone(), value.replace(&mounted, files.to_str().expect("UTF-8")))
    });
    (settings.collect(), files)
}

#[tokio::test(flavor = "multi_thread")]
async fn the_service_takes_its_settings_and_secrets_from_where_they_are_mounted() {
    let (environment, files) = environment();
    let end = Process::spawn(&["config"], &environment).end().await;
    std::fs::remove_dir_all(files).expect("the folder");
    assert_eq!(end.code(), Some(0), "{}", end.stderr);
    let effective: toml::Table = end.stdout.parse().expect("TOML");
    let is = |key: &str, value: &str| {
        let (section, name) = key.split_once('.').expect("a section");
        assert_eq!(effective[section][name].to_string().trim_matches('"'), value, "{key}");
    };
    is("database.url", "postgres://USER:***@postgres.example/stock");
    is("amqp.url", "amqp://USER:***@rabbitmq.example/%2f");
    is("database.migrate_on_start", "false");
    is("purge.enabled", "false");
    for file in PODS {
        let (pod, container) = (pod(file), container(file));
        assert_eq!(container["envFrom"], json!([{"configMapRef": {"name": "stock-service"}}]), "{file}");
        let mount = json!({"name": "secrets", "mountPath": "/run/secrets/stock-service", "readOnly": true});
        assert_eq!(container["volumeMounts"], json!([mount]), "{file}");
        // Owned by root, and readable for the group that the pod has.
        let secret = json!({"secretName": "stock-service", "defaultMode": 0o440});
        assert_eq!(pod["spec"]["volumes"], json!([{"name": "secrets", "secret": secret}]), "{file}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_pods_run_are_commands_of_the_service() {
    for file in PODS {
        let container = container(file);
        let end = Process::spawn(&[&texts(&container["args"])[..], &["--help"]].concat(), &[]).end().await;
        assert_eq!(end.code(), Some(0), "{file}: {}", end.stderr);
        assert!(container.get("command").is_none(), "{file}: the image's entry point is the service");
    }
    let purge = container("purge.yaml");
    assert_eq!(texts(&purge["args"])[1..], ["--horizon", &default("purge.horizon")]);
}

#[test]
fn a_stop_has_longer_than_the_service_takes_for_it() {
    let settings = Settings::load(None, [], &[]).expect("the defaults");
    let seconds = pod("deployment.yaml")["spec"]["terminationGracePeriodSeconds"].as_u64().expect("a number");
    let spare = seconds.checked_sub(settings.consume.grace.as_secs()).expect("a longer one");
    assert!(spare >= 5, "{spare} s to spare");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_probes_ask_for_what_is_answered_before_any_server_is_there() {
    let nowhere = [
        ("DATABASE_URL", "postgres://stock@127.0.0.1:1/stock"),
        ("AMQP_URL", "amqp://stock:stock@127.0.0.1:1/%2f"),
        ("STOCK__HTTP__LISTEN", "127.0.0.1:0"),
        ("STOCK__LOG__FORMAT", "json"),
    ];
    let process = Process::spawn(&["consume"], &nowhere.map(|(name, value)| (name.to_owned(), value.to_owned())));
    let endpoint = Endpoint::of(&process).await;
    let container = container("deployment.yaml");
    for (probe, status) in [("startupProbe", 200), ("livenessProbe", 200), ("readinessProbe", 503)] {
        let asked = &container[probe]["httpGet"];
        assert_eq!(endpoint.get(asked["path"].as_str().expect("a path")).await.0, status, "{probe}");
        assert_eq!(asked["port"], container["ports"][0]["name"], "{probe}");
    }
    let port = container["ports"][0]["containerPort"].as_u64().expect("a number");
    assert!(default("http.listen").ends_with(&format!(":{port}")));
    process.kill().await;
}

#[test]
fn workers_and_only_they_are_selected() {
    let workers = &pod("deployment.yaml")["metadata"]["labels"];
    let spread = &pod("deployment.yaml")["spec"]["topologySpreadConstraints"][0]["labelSelector"]["matchLabels"];
    let selectors = [
        &object("deployment.yaml")["spec"]["selector"]["matchLabels"],
        &object("pod-disruption-budget.yaml")["spec"]["selector"]["matchLabels"],
        &object("service.yaml")["spec"]["selector"],
        spread,
    ];
    for selector in selectors {
        assert_eq!(selector, workers);
    }
    for file in ["migrate.yaml", "purge.yaml"] {
        assert_ne!(&pod(file)["metadata"]["labels"], workers, "{file}");
    }
}

#[test]
fn the_metrics_have_one_port_everywhere() {
    let service = object("service.yaml");
    let container = container("deployment.yaml");
    assert_eq!(service["spec"]["ports"][0]["port"], container["ports"][0]["containerPort"]);
    assert_eq!(service["spec"]["ports"][0]["targetPort"], container["ports"][0]["name"]);
    assert_eq!(service["spec"]["clusterIP"], "None", "one address for each pod");
}

#[test]
fn keda_scales_the_deployment_by_the_queue_that_it_consumes() {
    let [scaled, authentication] = <[Value; 2]>::try_from(objects("scaled-object.yaml")).expect("two objects");
    let deployment = object("deployment.yaml");
    assert_eq!(scaled["spec"]["scaleTargetRef"]["name"], deployment["metadata"]["name"]);
    let replicas = |key: &str| scaled["spec"][key].as_u64().expect("a number");
    assert_eq!(Some(replicas("minReplicaCount")), deployment["spec"]["replicas"].as_u64());
    assert!(replicas("maxReplicaCount") > replicas("minReplicaCount"));

    let [trigger] = &scaled["spec"]["triggers"].as_array().expect("triggers")[..] else { panic!("one trigger") };
    assert_eq!(trigger["authenticationRef"]["name"], authentication["metadata"]["name"]);
    // All values are texts, and what the RabbitMQ scaler does not know it passes over without a word.
    let metadata: BTreeMap<String, String> = serde_json::from_value(trigger["metadata"].clone()).expect("texts");
    let known = ["activationValue", "mode", "protocol", "queueName", "value", "vhostName"];
    assert!(metadata.keys().all(|key| known.contains(&key.as_str())), "{metadata:?}");
    assert_eq!(metadata["queueName"], default("amqp.queue"));
    let value: u64 = metadata["value"].parse().expect("a number");
    let settings = Settings::load(None, [], &[]).expect("the defaults").consume;
    assert!(value > u64::from(settings.workers) * u64::from(settings.prefetch), "a pod has as much in its own hands");

    let secret = object("secret.example.yaml");
    for reference in authentication["spec"]["secretTargetRef"].as_array().expect("references") {
        assert_eq!(reference["name"], secret["metadata"]["name"]);
        assert!(secret["stringData"].get(reference["key"].as_str().expect("a text")).is_some(), "{reference}");
    }
}
