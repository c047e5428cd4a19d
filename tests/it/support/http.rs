//! What a running process says over HTTP.

use std::net::SocketAddr;

use super::{Process, eventually};

/// Where one process answers.
#[derive(Clone, Copy, Debug)]
pub struct Endpoint(SocketAddr);

impl Endpoint {
    /// That of a process that was started with `http.listen` at port 0: the system chose one, and the process says which.
    pub async fn of(process: &Process) -> Self {
        process.has_said("listening for HTTP").await;
        let said = process.stderr_so_far();
        let line = said.lines().find(|line| line.contains("listening for HTTP")).expect("a line");
        let line: serde_json::Value = serde_json::from_str(line).expect("JSON");
        Self(line["address"].as_str().expect("an address").parse().expect("an address"))
    }

    /// The address, for `http.listen`.
    pub fn address(self) -> String {
        self.0.to_string()
    }

    /// Status and body.
    pub async fn get(self, path: &str) -> (u16, String) {
        let (status, body) = stock_service::http::get(self.0, path).await.expect("an answer");
        (status.as_u16(), body)
    }

    /// Waits until it is ready, or is not.
    pub async fn is_ready(self, ready: bool) {
        let status = if ready { 200 } else { 503 };
        eventually(&format!("/readyz says {status}"), async || self.get("/readyz").await.0 == status).await;
    }

    /// Waits until it is not ready, and says that this part is why; gives the cause.
    pub async fn is_not_ready_for(self, part: &str) -> String {
        let cause = async || {
            let (status, body) = self.get("/readyz").await;
            let body: serde_json::Value = serde_json::from_str(&body).expect("JSON");
            let findings = body["not_ready"].as_array().expect("a list").clone();
            assert_eq!(status == 200, findings.is_empty(), "{body}");
            let finding = findings.into_iter().find(|finding| finding["part"].as_str() == Some(part));
            finding.map(|finding| finding["cause"].as_str().expect("a text").to_owned())
        };
        eventually(&format!("/readyz names {part}"), async || cause().await.is_some()).await;
        cause().await.unwrap_or_default()
    }

    /// The value of a series, named as the metrics page does.
    pub async fn metric(self, series: &str) -> f64 {
        let (_, text) = self.get("/metrics").await;
        let line = text.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("no {series} in {text}")).parse().expect("a number")
    }
}
