//! The queries, asked of a real Prometheus that scrapes a real service and a real broker.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::PathBuf;
use std::process::Stdio;

use serde_json::{Value, json};
use tokio::process::{Child, Command};

use super::{SELECTOR, alerts, dashboard, list, queries, read, text, yaml};
use crate::support::{Endpoint, Order, Servers, TestBed, eventually, id};

/// A port that nobody listens on.
fn free_port() -> SocketAddr {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port").local_addr().expect("an address")
}

/// A running Prometheus; it is killed when this is dropped.
struct Prometheus {
    address: SocketAddr,
    folder: PathBuf,
    _process: Child,
}

impl Prometheus {
    /// With `prometheus.yml` as it is, but for the addresses, the haste, and the name of the queue in `alerts.yml`.
    fn start(service: Endpoint, broker: SocketAddr, queue: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("stock-service-prometheus-{}", id()));
        std::fs::create_dir(&folder).expect("a folder");
        let mut config = yaml("prometheus.yml");
        config["global"] = json!({"scrape_interval": "1s", "evaluation_interval": "1s"});
        for job in config["scrape_configs"].as_array_mut().expect("jobs") {
            let address = match text(&job["job_name"]) {
                "stock-service" => service.address(),
                "rabbitmq" => broker.to_string(),
                other => panic!("nobody to scrape for {other}"),
            };
            job.as_object_mut().expect("a job").remove("dns_sd_configs");
            job["static_configs"] = json!([{"targets": [address]}]);
        }
        std::fs::write(folder.join("prometheus.yml"), config.to_string()).expect("a file"); // JSON is YAML
        let rules = read("deploy/observability/alerts.yml").replace("stock.events", queue);
        std::fs::write(folder.join("alerts.yml"), rules).expect("a file");
        let address = free_port();
        let program = std::env::var("STOCK_TEST_PROMETHEUS").expect("the program; `make deploy-check` sets it");
        let process = Command::new(program)
            .arg(format!("--config.file={}", folder.join("prometheus.yml").display()))
            .arg(format!("--storage.tsdb.path={}", folder.join("data").display()))
            .arg(format!("--web.listen-address={address}"))
            .arg("--log.level=error")
            .stdin(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .expect("prometheus");
        Self { address, folder, _process: process }
    }

    /// The data of an answer; none while it starts. It panics over a query that cannot be read.
    async fn ask(&self, path: &str) -> Option<Value> {
        let (status, body) = stock_service::http::get(self.address, path).await.ok()?;
        let mut body: Value = serde_json::from_str(&body).ok()?; // "Service Unavailable"
        assert_eq!(status.as_u16(), 200, "{path}: {body}");
        Some(body["data"].take())
    }

    /// Whether a query gives a number.
    async fn has(&self, query: &str) -> bool {
        let query: String = url::form_urlencoded::byte_serialize(query.as_bytes()).collect();
        let Some(data) = self.ask(&format!("/api/v1/query?query={query}")).await else { return false };
        list(&data["result"]).iter().any(|series| text(&series["value"][1]) != "NaN")
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        // What cannot be removed is the system's to clean up.
        std::fs::remove_dir_all(&self.folder).ok();
    }
}

/// Has the broker show its metrics, as its container image does from the start.
async fn show_metrics(servers: &Servers) -> SocketAddr {
    let address = free_port();
    let enable = format!(
        r#"application:load(rabbitmq_prometheus),
           application:set_env(rabbitmq_prometheus, tcp_config, [{{ip, "127.0.0.1"}}, {{port, {}}}]),
           Plugins = rabbit_plugins:enabled_plugins_file(),
           ok = file:write_file(Plugins, "[rabbitmq_prometheus]."),
           {{ok, _, _}} = rabbit_plugins:ensure(Plugins)."#,
        address.port()
    );
    servers.rabbitmqctl(&["eval", &enable]).await;
    address
}

/// A bit of everything: new orders, copies, an event that fails for a while and then for good, no event.
async fn publish(bed: &TestBed) {
    let mut bodies: Vec<_> = Order::many(20).iter().map(Order::body).collect();
    bodies.push(bodies[0].clone());
    bodies.push(Order::of("13").body());
    bodies.push("no event".to_owned());
    bed.broker.publish_all(Order::EVENT, bodies).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Prometheus: make deploy-check"]
async fn a_running_service_fills_every_panel_and_feeds_every_alert() {
    let servers = Servers::start_rabbitmq().await;
    let mut bed = servers.bed().await;
    bed.on_reservation("if new.quantity = 13 then raise 'unlucky'; end if;").await;
    bed.set("purge.every", "1s");
    bed.set("http.listen", "127.0.0.1:0");
    let process = bed.spawn(&["consume"]);
    let service = Endpoint::of(&process).await;
    let queue = bed.broker.queue();
    let prometheus = Prometheus::start(service, show_metrics(&servers).await, &queue);

    let dashboard = dashboard();
    for (title, query) in queries(&dashboard) {
        let query = query
            .replace("$__rate_interval", "10s")
            .replace("$instance", ".*")
            .replace("${queue:regex}", &queue)
            .replace("${queue}", &queue)
            .replace("$queue", &queue);
        eventually(&format!("{title}: {query}"), async || {
            publish(&bed).await;
            prometheus.has(&query).await
        })
        .await;
    }

    let file = yaml("alerts.yml");
    for selector in alerts(&file).iter().flat_map(|rule| SELECTOR.find_iter(text(&rule["expr"]))) {
        let selector = selector.as_str().replace("stock.events", &queue);
        eventually(&selector, async || prometheus.has(&format!("count({selector})")).await).await;
    }
    eventually("all rules are evaluated, and an alert sees the failures", async || {
        let Some(data) = prometheus.ask("/api/v1/rules").await else { return false };
        let rules = list(&data["groups"][0]["rules"]);
        let health = |rule: &Value| assert_ne!(rule["health"], "err", "{rule}");
        rules.iter().for_each(health);
        rules.len() == alerts(&file).len()
            && rules.iter().any(|rule| rule["name"] == "StockServiceMessagesFail" && rule["state"] != "inactive")
    })
    .await;

    process.signal("TERM").await;
    assert_eq!(process.end().await.code(), Some(0));
    bed.remove().await;
}
