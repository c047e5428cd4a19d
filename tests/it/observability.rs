//! The files in `deploy/observability` name what the service shows, and one another. `make deploy-check` has promtool look at
//! them, and runs the test here that fills the dashboard.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::LazyLock;

use regex::Regex;
use serde_json::Value;
use stock_service::telemetry::Metrics;

mod live;

fn read(path: &str) -> String {
    let path = format!("{}/{path}", env!("CARGO_MANIFEST_DIR"));
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn yaml(file: &str) -> Value {
    serde_saphyr::from_str(&read(&format!("deploy/observability/{file}"))).expect(file)
}

fn dashboard() -> Value {
    serde_json::from_str(&read("deploy/observability/grafana/dashboards/stock-service.json")).expect("JSON")
}

fn list(value: &Value) -> &[Value] {
    value.as_array().expect("a list")
}

fn text(value: &Value) -> &str {
    value.as_str().expect("a text")
}

/// A dashboard's panels, rows of them left out.
fn panels(dashboard: &Value) -> impl Iterator<Item = &Value> {
    list(&dashboard["panels"]).iter().filter(|panel| panel["type"] != "row")
}

/// The queries of the dashboard, each with the title of its panel.
fn queries(dashboard: &Value) -> Vec<(&str, &str)> {
    let mut queries = Vec::new();
    for panel in panels(dashboard) {
        queries.extend(list(&panel["targets"]).iter().map(|target| (text(&panel["title"]), text(&target["expr"]))));
    }
    queries
}

fn alerts(file: &Value) -> &[Value] {
    list(&file["groups"][0]["rules"])
}

/// A series as queries name it: the name, and what stands in braces behind it.
static SELECTOR: LazyLock<Regex> =
    LazyLock::new(|| Regex::new(r"\b((?:stock_service|rabbitmq)_\w+|up)\b(\{[^}]*\})?").expect("a regex"));

/// One label in braces.
static LABEL: LazyLock<Regex> = LazyLock::new(|| Regex::new(r#"(\w+)(?:=~?|!=|!~)"([^"]*)""#).expect("a regex"));

/// Names and values of the labels in a text.
fn labels(text: &str) -> impl Iterator<Item = (&str, &str)> {
    LABEL.captures_iter(text).map(|label| label.extract()).map(|(_, [name, value])| (name, value))
}

/// The series that a query names, each with its labels.
fn series(query: &str) -> impl Iterator<Item = (&str, &str)> {
    SELECTOR.captures_iter(query).map(|found| {
        let part = |index| found.get(index).map_or("", |part| part.as_str());
        (part(1), part(2))
    })
}

/// What the metrics page shows: the labels of each name with their values.
fn shown() -> BTreeMap<String, BTreeMap<String, BTreeSet<String>>> {
    let page = Metrics::default().to_text();
    let mut shown: BTreeMap<_, BTreeMap<_, BTreeSet<_>>> = BTreeMap::new();
    for (name, braces) in page.lines().filter(|line| !line.starts_with('#')).flat_map(series) {
        let known = shown.entry(name.to_owned()).or_default();
        for (label, value) in labels(braces) {
            known.entry(label.to_owned()).or_default().insert(value.to_owned());
        }
    }
    shown
}

#[test]
fn every_series_that_is_named_is_one_that_the_service_shows() {
    let (file, cases, dashboard) = (yaml("alerts.yml"), yaml("alerts.test.yml"), dashboard());
    let mut named: Vec<_> = alerts(&file).iter().map(|rule| text(&rule["expr"])).collect();
    for case in list(&cases["tests"]) {
        named.extend(list(&case["input_series"]).iter().map(|input| text(&input["series"])));
    }
    named.extend(queries(&dashboard).iter().map(|(_, query)| *query));
    named.extend(list(&dashboard["templating"]["list"]).iter().filter_map(|variable| variable["definition"].as_str()));
    let shown = shown();
    let mut checked = 0;
    for query in named {
        // Others are not the service's: the live test asks for them.
        for (name, braces) in series(query).filter(|(name, _)| name.starts_with("stock_service_")) {
            let known = shown.get(name).unwrap_or_else(|| panic!("{name} in {query}"));
            // The one is the scraper's own; of the other any number will do.
            for (label, value) in labels(braces).filter(|(label, _)| !["instance", "le"].contains(label)) {
                let values = known.get(label).unwrap_or_else(|| panic!("{label} in {query}"));
                assert!(values.contains(value), "{label}={value} in {query}");
            }
            checked += 1;
        }
    }
    assert!(checked > 80, "{checked} series");
}

#[test]
fn every_series_that_the_service_shows_is_on_a_panel() {
    let dashboard = dashboard();
    for name in shown().keys() {
        let metric = ["_bucket", "_sum", "_count"].iter().find_map(|part| name.strip_suffix(part)).unwrap_or(name);
        assert!(queries(&dashboard).iter().any(|(_, query)| query.contains(metric)), "{name}");
    }
}

#[test]
fn labels_that_are_summed_by_are_those_of_the_series() {
    let (file, dashboard, shown) = (yaml("alerts.yml"), dashboard(), shown());
    let by = Regex::new(r"\bby \(([^)]*)\)").expect("a regex");
    let expressions = alerts(&file).iter().map(|rule| text(&rule["expr"]));
    for query in expressions.chain(queries(&dashboard).into_iter().map(|(_, query)| query)) {
        for label in by.captures_iter(query).flat_map(|by| by.extract::<1>().1[0].split(", ")) {
            let known = |(name, _)| shown.get(name).is_some_and(|labels| labels.contains_key(label));
            let scraped = ["instance", "queue"].contains(&label);
            assert!(scraped || series(query).all(known), "{label} in {query}");
        }
    }
}

/// The alerts of which a case says that they fire.
fn firing(cases: &Value) -> BTreeSet<String> {
    let mut firing = BTreeSet::new();
    for case in list(&cases["tests"]) {
        for test in case["alert_rule_test"].as_array().into_iter().flatten() {
            if !list(&test["exp_alerts"]).is_empty() {
                firing.insert(text(&test["alertname"]).to_owned());
            }
        }
        for sample in list(&case["promql_expr_test"]).iter().flat_map(|test| list(&test["exp_samples"])) {
            let name = labels(text(&sample["labels"])).find(|(label, _)| *label == "alertname");
            firing.insert(name.expect("the name of an alert").1.to_owned());
        }
    }
    firing
}

#[test]
fn every_alert_says_what_it_is_about_has_its_page_and_fires_in_a_test() {
    let (file, cases, operation) = (yaml("alerts.yml"), yaml("alerts.test.yml"), read("docs/OPERATION.md"));
    let firing = firing(&cases);
    let headings: BTreeSet<_> = operation.lines().filter_map(|line| line.strip_prefix("### ")).collect();
    let mut names = BTreeSet::new();
    for rule in alerts(&file) {
        let name = text(&rule["alert"]);
        assert!(text(&rule["for"]).ends_with(['m', 'h']), "{name}");
        assert!(["critical", "warning"].contains(&text(&rule["labels"]["severity"])), "{name}");
        assert!(
            !text(&rule["annotations"]["summary"]).is_empty() && !text(&rule["annotations"]["description"]).is_empty()
        );
        let page = format!("docs/OPERATION.md#{}", name.to_lowercase());
        assert_eq!(text(&rule["annotations"]["runbook"]), page);
        assert!(headings.contains(name), "{name} has no heading in docs/OPERATION.md");
        assert!(firing.contains(name), "{name} fires in no test");
        names.insert(name);
    }
    let explained = headings.iter().filter(|heading| heading.starts_with("StockService"));
    assert_eq!(explained.copied().collect::<BTreeSet<_>>(), names);
}

#[test]
fn the_panels_explain_themselves_and_lie_side_by_side() {
    let dashboard = dashboard();
    let mut ids = BTreeSet::new();
    let mut taken = BTreeMap::new();
    for panel in list(&dashboard["panels"]) {
        let title = text(&panel["title"]);
        assert!(ids.insert(panel["id"].as_u64()), "{title}: another one has its number");
        let place = ["x", "y", "w", "h"].map(|side| panel["gridPos"][side].as_u64().expect("a number"));
        let [x, y, width, height] = place;
        assert!(x + width <= 24, "{title}");
        for cell in (x..x + width).flat_map(|x| (y..y + height).map(move |y| (x, y))) {
            if let Some(other) = taken.insert(cell, title) {
                panic!("{title} lies over {other}");
            }
        }
    }
    for panel in panels(&dashboard) {
        assert!(!text(&panel["description"]).is_empty(), "{}", panel["title"]);
        assert_eq!(panel["datasource"]["uid"], "${datasource}", "{}", panel["title"]);
    }
}

#[test]
fn grafana_and_prometheus_are_given_addresses_and_files_that_there_are() {
    let prometheus = yaml("prometheus.yml");
    assert_eq!(prometheus["rule_files"], serde_json::json!(["alerts.yml"]));
    let discovery = &prometheus["scrape_configs"][0]["dns_sd_configs"][0];
    let defaults = stock_service::settings::DEFAULTS;
    assert!(defaults.contains(&format!("listen = \"127.0.0.1:{}\"", discovery["port"])), "{discovery}");
    let manifest = read("deploy/kubernetes/service.yaml");
    assert!(manifest.contains(&format!("name: {}", text(&discovery["names"][0]))), "{discovery}");
    let source = yaml("grafana/provisioning/datasources/prometheus.yml");
    let interval = &source["datasources"][0]["jsonData"]["timeInterval"];
    assert_eq!(interval, &prometheus["global"]["scrape_interval"]);
    assert_eq!(source["datasources"][0]["type"], "prometheus");

    let compose: Value = serde_saphyr::from_str(&read("docker-compose.yml")).expect("YAML");
    let services = &compose["services"];
    for address in
        [&prometheus["scrape_configs"][1]["static_configs"][0]["targets"][0], &source["datasources"][0]["url"]]
    {
        let host = text(address).trim_start_matches("http://").split(':').next().expect("a host");
        assert!(services[host].is_object(), "{address} is no service of docker-compose.yml");
    }
    assert!(services[text(&discovery["names"][0])].is_object());
    let mut mounted = BTreeSet::new();
    for volume in ["prometheus", "grafana"].iter().flat_map(|service| list(&services[*service]["volumes"])) {
        let [file, place, ..] = text(volume).split(':').collect::<Vec<_>>()[..] else { panic!("{volume}") };
        let is_ours = file.starts_with("./");
        assert!(
            !is_ours || std::fs::exists(format!("{}/{file}", env!("CARGO_MANIFEST_DIR"))).expect("a folder"),
            "{file}"
        );
        mounted.insert(place.to_owned());
    }
    let provider = yaml("grafana/provisioning/dashboards/stock-service.yml");
    assert!(mounted.contains(text(&provider["providers"][0]["options"]["path"])), "{mounted:?}");
}
