//! The truth about the running service over HTTP: `/livez`, `/readyz` and `/metrics`. Reads, and never writes.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get as on_get;
use http_body_util::{BodyExt, Empty};
use hyper::body::Bytes;
use hyper_util::rt::TokioIo;
use serde::Serialize;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Mutex;
use tokio::time::{Instant, timeout};

use crate::db::{Database, explain};
use crate::telemetry::{Finding, Monitor, Report};

/// How long the database may take to answer a probe; a probe's own limit is often a few seconds.
const PING_TIMEOUT: Duration = Duration::from_secs(2);

/// How long the answer holds for further probes: however many there are, the database is not asked more often.
const PING_HOLDS: Duration = Duration::from_secs(1);

/// Where it listens.
///
/// # Errors
/// The address is in use, or none of this machine's; the text names the setting.
pub async fn listen(address: SocketAddr) -> anyhow::Result<TcpListener> {
    let listener = TcpListener::bind(address).await;
    listener.with_context(|| format!("cannot listen on {address} (http.listen; \"off\" listens nowhere)"))
}

/// Answers, for as long as it is polled.
///
/// # Errors
/// The listener's.
pub async fn serve(listener: TcpListener, monitor: Monitor, database: Database) -> std::io::Result<()> {
    let service = Service { monitor, database, ping: Arc::default() };
    let router = Router::new()
        .route("/livez", on_get(livez))
        .route("/readyz", on_get(readyz))
        .route("/metrics", on_get(metrics))
        .with_state(service);
    axum::serve(listener, router).await
}

/// Asks for a path of another process; gives the status and the body.
///
/// # Errors
/// Nobody listens there, or it speaks no HTTP.
pub async fn get(address: SocketAddr, path: &str) -> anyhow::Result<(StatusCode, String)> {
    let stream = TcpStream::connect(address).await?;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    let request = hyper::Request::get(path).header(header::HOST, address.to_string()).body(Empty::<Bytes>::new())?;
    // Takes the sender along: the connection, which is what moves the bytes, lasts as long as that.
    let ask = async move {
        let response = sender.send_request(request).await?;
        let status = response.status();
        let body = response.into_body().collect().await?.to_bytes();
        anyhow::Ok((status, String::from_utf8_lossy(&body).into_owned()))
    };
    let (answer, _) = tokio::join!(ask, connection);
    answer
}

#[derive(Clone)]
struct Service {
    monitor: Monitor,
    database: Database,
    ping: Arc<Mutex<Option<Ping>>>,
}

/// What the database last answered.
struct Ping {
    asked: Instant,
    trouble: Option<Finding>,
}

/// Whether the process can still do its work by itself. An outage of a server is no reason to restart it.
async fn livez(State(service): State<Service>) -> Response {
    #[derive(Serialize)]
    struct Body {
        live: bool,
        fatal: Vec<Finding>,
    }

    let fatal = service.monitor.health.fatal();
    answer(fatal.is_empty(), &Body { live: fatal.is_empty(), fatal })
}

/// Whether it consumes now.
async fn readyz(State(service): State<Service>) -> Response {
    #[derive(Serialize)]
    struct Body {
        ready: bool,
        #[serde(flatten)]
        report: Report,
    }

    let report = service.report().await;
    answer(report.not_ready.is_empty(), &Body { ready: report.not_ready.is_empty(), report })
}

async fn metrics(State(service): State<Service>) -> Response {
    service.monitor.metrics.ready(service.report().await.not_ready.is_empty());
    let format = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(header::CONTENT_TYPE, format)], service.monitor.metrics.to_text()).into_response()
}

impl Service {
    async fn report(&self) -> Report {
        let mut report = self.monitor.health.report();
        if report.not_ready.is_empty() {
            report.not_ready.extend(self.ping().await);
        }
        report
    }

    /// What is wrong with the database, if it has to be asked: an idle service would not notice, and one that is in
    /// trouble already asks by itself.
    async fn ping(&self) -> Option<Finding> {
        if self.monitor.health.has_committed_lately() {
            return None;
        }
        let mut last = self.ping.lock().await;
        if let Some(Ping { asked, trouble }) = &*last
            && asked.elapsed() < PING_HOLDS
        {
            return trouble.clone();
        }
        let cause = match timeout(PING_TIMEOUT, self.database.ping()).await {
            Ok(Ok(())) => None,
            Ok(Err(error)) => Some(format!("{:#}", explain(error))),
            Err(_) => Some(format!("no answer within {PING_TIMEOUT:?}")),
        };
        let trouble = cause.map(|cause| Finding { part: "database".to_owned(), cause, seconds: 0 });
        *last = Some(Ping { asked: Instant::now(), trouble: trouble.clone() });
        trouble
    }
}

fn answer(good: bool, body: &impl Serialize) -> Response {
    let status = if good { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    // Text and numbers, which always can be written.
    let body = serde_json::to_string(body).unwrap_or_default();
    (status, [(header::CONTENT_TYPE, "application/json")], body).into_response()
}
