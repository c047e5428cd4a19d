//! The way to the broker by TLS: who is trusted, who is refused, and what is said about it.

use std::net::TcpListener;

use crate::doctor::doctor;
use crate::support::{Authority, Identity, Order, Servers, TestBed};

/// A broker of the test's own that speaks TLS.
struct Broker {
    servers: Servers,
    authority: Authority,
}

impl Broker {
    async fn start() -> Self {
        Self { servers: Servers::start_rabbitmq().await, authority: Authority::new("Authority") }
    }

    /// Has it listen on another port with this certificate; gives the port. With an authority it demands a certificate
    /// of that one's from each client.
    async fn listen(&self, identity: &Identity, demanded: Option<&Authority>) -> u16 {
        let port = TcpListener::bind("127.0.0.1:0").and_then(|socket| socket.local_addr()).expect("a free port").port();
        let demand = demanded.map(|authority| {
            format!(",{{cacertfile,{:?}}},{{verify,verify_peer}},{{fail_if_no_peer_cert,true}}", authority.path())
        });
        let listen = format!(
            "{{ok,_}} = application:ensure_all_started(ssl),
             ok = rabbit_networking:start_ssl_listener({{\"127.0.0.1\",{port}}},
                 [{{certfile,{:?}}},{{keyfile,{:?}}}{}], 1).",
            identity.certificate.path(),
            identity.key.path(),
            demand.unwrap_or_default()
        );
        self.servers.rabbitmqctl(&["eval", &listen]).await;
        port
    }

    /// The URL of a host and a port, with these parameters.
    fn url(scheme: &str, host: &str, port: u16, parameters: &str) -> String {
        format!("{scheme}://stock:stock@{host}:{port}/%2f?{parameters}")
    }
}

/// One order and one failed message go all the way: there are two connections, and both are by TLS.
async fn works(bed: &mut TestBed, url: &str) {
    bed.set("amqp.url", url);
    bed.broker.publish_all(Order::EVENT, [Order::new(1).body(), "no event".to_owned()]).await;
    let before = bed.processed().await;
    let end = bed.spawn(&["consume", "--until-empty"]).end().await;
    assert_eq!(end.code(), Some(0), "{}", end.stderr);
    assert_eq!(bed.processed().await, before + 1);
    bed.broker.failed(1).await;
}

/// The doctor's finding about the broker, which is an error; and the service says the same in its log, and waits.
async fn fault(bed: &mut TestBed, url: &str) -> (String, String, String) {
    bed.set("amqp.url", url);
    let (check, finding, remedy) = doctor(bed).await.only_error();
    let (_, cause) = finding.split_once(": ").expect("a place and a cause");
    let mut service = bed.spawn(&["consume"]);
    let wants_certificate = "certfile and keyfile in AMQP_URL";
    service
        .has_said(&match &*check {
            // The broker gives its reason and closes: who is slow only sees that.
            _ if remedy.contains(wants_certificate) => wants_certificate.to_owned(),
            "broker.tls" => format!("{cause}; {remedy}"),
            _ => cause.to_owned(),
        })
        .await;
    assert!(service.is_running(), "it tries again");
    service.kill().await;
    (check, finding, remedy)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_of_a_private_ca_is_served_with_a_client_certificate_and_without() {
    let broker = Broker::start().await;
    let mut bed = broker.servers.bed().await;
    let (ca, server) = (broker.authority.path(), broker.authority.issue(&["localhost", "127.0.0.1"]));
    let port = broker.listen(&server, None).await;
    works(&mut bed, &Broker::url("amqps", "localhost", port, &format!("cacertfile={ca}&verify=verify_peer"))).await;
    works(&mut bed, &Broker::url("amqps", "127.0.0.1", port, &format!("cacertfile={ca}"))).await;

    let clients = Authority::new("Clients");
    let client = clients.issue(&[]);
    let port = broker.listen(&server, Some(&clients)).await;
    let identity = format!("certfile={}&keyfile={}", client.certificate.path(), client.key.path());
    works(&mut bed, &Broker::url("amqps", "localhost", port, &format!("cacertfile={ca}&{identity}"))).await;

    // Without a file it is the system whose word counts, which it does not beside a file.
    bed.set_variable("SSL_CERT_FILE", ca);
    works(&mut bed, &Broker::url("amqps", "localhost", port, &identity)).await;
    let stranger = Authority::new("Stranger");
    let parameters = format!("cacertfile={}&{identity}", stranger.path());
    let (check, finding, _) = fault(&mut bed, &Broker::url("amqps", "localhost", port, &parameters)).await;
    assert!(check == "broker.tls" && finding.contains("issued by nobody"), "{check}: {finding}");
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_fault_of_tls_is_named_with_its_way_out_and_told_apart_from_a_broker_that_is_away() {
    let broker = Broker::start().await;
    let mut bed = broker.servers.bed().await;
    let (ca, stranger) = (broker.authority.path(), Authority::new("Stranger"));
    let namesake = Authority::new("Authority");
    let server = broker.authority.issue(&["localhost"]);
    let trusting = format!("cacertfile={ca}");
    let with = |certificate: &str, key: &str| format!("{trusting}&certfile={certificate}&keyfile={key}");

    let good = broker.listen(&server, None).await;
    // The broker reads the files when somebody connects.
    let identities = [broker.authority.issue_expired(&["localhost"]), broker.authority.issue(&[])];
    let expired = broker.listen(&identities[0], None).await;
    let nameless = broker.listen(&identities[1], None).await;
    let demanding = broker.listen(&server, Some(&broker.authority)).await;
    let plain = url::Url::parse(bed.variable("AMQP_URL")).expect("a URL").port().expect("a port");
    let (client, other) = (broker.authority.issue(&[]), stranger.issue(&[]));

    for (host, port, parameters, cause, remedy) in [
        ("127.0.0.1", good, trusting.clone(), "not for 127.0.0.1, but for localhost", "as the host in AMQP_URL"),
        ("localhost", good, format!("cacertfile={}", stranger.path()), "issued by nobody", "cacertfile in AMQP_URL"),
        ("localhost", good, format!("cacertfile={}", namesake.path()), "issued by nobody", "cacertfile in AMQP_URL"),
        ("localhost", nameless, trusting.clone(), "has no host name (subjectAltName)", "have it issued for this host"),
        ("localhost", expired, trusting.clone(), "expired at 2021-01-01T00:00:00Z", "renew it"),
        ("localhost", good, "cacertfile=/no/ca.pem".to_owned(), "/no/ca.pem does not exist", "correct cacertfile"),
        ("localhost", good, "cacertfile=/tmp".to_owned(), "/tmp is a folder", "correct cacertfile"),
        ("localhost", good, "cacertfile=/proc/self/mem".to_owned(), "cannot be read", "correct cacertfile"),
        ("localhost", good, format!("cacertfile={}", client.key.path()), "no certificate", "correct cacertfile"),
        ("localhost", good, with("/no/c.pem", client.key.path()), "/no/c.pem does not exist", "correct certfile"),
        (
            "localhost",
            good,
            with(client.certificate.path(), "/no/k.pem"),
            "/no/k.pem does not exist",
            "correct keyfile",
        ),
        ("localhost", good, with(client.certificate.path(), ca), "no private key", "correct keyfile"),
        ("localhost", good, with(client.certificate.path(), other.key.path()), "the key in keyfile is not", "AMQP_URL"),
        ("localhost", demanding, trusting.clone(), "the server", "certfile and keyfile in AMQP_URL"),
        (
            "localhost",
            demanding,
            with(other.certificate.path(), other.key.path()),
            "the server",
            "certfile and keyfile in AMQP_URL",
        ),
        ("localhost", plain, trusting.clone(), "does not speak TLS", "port of its TLS listener"),
    ] {
        let url = Broker::url("amqps", host, port, &parameters);
        let (check, finding, way_out) = fault(&mut bed, &url).await;
        assert_eq!(check, "broker.tls", "{url}: {finding}");
        assert!(finding.contains(cause) && way_out.contains(remedy), "{url}: {finding}; {way_out}");
    }

    // The system's word counts, and it has none.
    bed.set_variable("SSL_CERT_FILE", "/no/certificates");
    let (_, finding, _) = fault(&mut bed, &Broker::url("amqps", "localhost", good, "heartbeat=10")).await;
    assert!(finding.contains("this system has no CA certificates"), "{finding}");
    // A file of one's own needs no certificates of the system's.
    works(&mut bed, &Broker::url("amqps", "localhost", good, &trusting)).await;

    let (check, finding, _) = fault(&mut bed, &Broker::url("amqps", "localhost", 1, "cacertfile=/no/ca.pem")).await;
    assert_eq!(check, "broker.reachable", "{finding}");
    let (check, finding, _) = fault(&mut bed, &Broker::url("amqp", "localhost", good, "heartbeat=10")).await;
    assert!(check == "broker.reachable" && finding.contains("a TLS listener wants amqps://"), "{check}: {finding}");
    bed.finish().await;
}
