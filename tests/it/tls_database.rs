//! The way to the database by TLS: who is trusted, who is refused, and what is said about it.

use crate::doctor::doctor;
use crate::support::{Authority, Identity, Order, Servers, TestBed, eventually};

/// Has the server show this certificate from the next connection on, and demand one of the authority's from the test's
/// user.
async fn serve(bed: &TestBed, identity: &Identity, clients: &Authority) {
    let folder = bed.text("show data_directory").await.expect("a folder");
    // The server takes a key that nobody else can read, and only it itself can write one.
    write(bed, &format!("{folder}/server.key"), &identity.key.content()).await;
    for (setting, value) in [
        ("ssl", "on"),
        ("ssl_cert_file", identity.certificate.path()),
        ("ssl_key_file", "server.key"),
        ("ssl_ca_file", clients.path()),
    ] {
        bed.execute(&format!("alter system set {setting} = '{value}'")).await;
    }
    reload(bed).await;
}

/// Has the server read its settings anew, and waits until it has.
async fn reload(bed: &TestBed) {
    const LOADED: &str = "select pg_conf_load_time()::text";

    let before = bed.text(LOADED).await;
    bed.execute("select pg_reload_conf()").await;
    eventually("the server has read its settings", async || bed.text(LOADED).await != before).await;
}

/// Has the server write a file.
async fn write(bed: &TestBed, path: &str, content: &str) {
    let lines = content.lines().collect::<Vec<_>>().join("\n");
    let copy = format!("copy (select unnest(string_to_array('{lines}', e'\\n'))) to program 'umask 077; cat > {path}'");
    bed.execute(&copy).await;
}

/// Has the server let in whom these lines of its `pg_hba.conf` do.
async fn admit(bed: &TestBed, rules: &str) {
    let file = bed.text("show hba_file").await.expect("a file");
    write(bed, &file, rules).await;
    reload(bed).await;
}

/// The URL of the test's database at another host, with these parameters.
fn url(bed: &TestBed, host: &str, parameters: &str) -> String {
    let mut url = url::Url::parse(bed.variable("DATABASE_URL")).expect("a URL");
    url.set_host(Some(host)).expect("a host");
    url.set_query(Some(parameters));
    url.into()
}

/// An order goes all the way, by TLS.
async fn works(bed: &mut TestBed, url: &str) {
    bed.set("database.url", url);
    let order = Order::new(1);
    bed.broker.publish(Order::EVENT, order.body()).await;
    let end = bed.spawn(&["consume", "--until-empty"]).end().await;
    assert_eq!(end.code(), Some(0), "{}", end.stderr);
    assert_eq!(bed.reservations_of(&order).await, 1, "{}", end.stderr);
}

/// The doctor's finding about the database, which is an error; and the service says the same in its log, and waits.
async fn fault(bed: &mut TestBed, url: &str) -> (String, String, String) {
    bed.set("database.url", url);
    let (check, finding, remedy) = doctor(bed).await.only_error();
    let (_, cause) = finding.split_once(": ").expect("a place and a cause");
    let said = if check == "database.tls" { format!("{cause}; {remedy}") } else { cause.to_owned() };
    let mut service = bed.spawn(&["consume"]);
    service.has_said(&said.replace('"', "\\\"")).await;
    assert!(service.is_running(), "it tries again");
    service.kill().await;
    (check, finding, remedy)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_database_of_a_private_ca_is_served_with_a_client_certificate_and_without() {
    let servers = Servers::start_postgres().await;
    let mut bed = servers.bed().await;
    bed.set_ladder(0, 50);
    bed.on_reservation(
        "if not (select ssl from pg_stat_ssl where pid = pg_backend_pid()) then raise 'not by TLS'; end if;",
    )
    .await;
    let (authority, clients, stranger) =
        (Authority::new("Authority"), Authority::new("Clients"), Authority::new("Stranger"));
    let (server, client) = (authority.issue(&["localhost", "127.0.0.1"]), clients.issue(&["stock"]));
    serve(&bed, &server, &clients).await;

    for host in ["localhost", "127.0.0.1"] {
        let trusting = format!("sslmode=verify-full&sslrootcert={}", authority.path());
        let verified = url(&bed, host, &trusting);
        works(&mut bed, &verified).await;
    }
    let identity = format!("sslcert={}&sslkey={}", client.certificate.path(), client.key.path());
    let identified =
        url(&bed, "localhost", &format!("sslmode=verify-full&sslrootcert={}&{identity}", authority.path()));
    works(&mut bed, &identified).await;
    // Of the service alone: the test itself has no certificate.
    let user = bed.demote().await;
    bed.set("database.migrate_on_start", "false");
    let demoted = bed.variable("STOCK__DATABASE__URL").to_owned();
    bed.set_variable("DATABASE_URL", &demoted);
    let rules = format!("hostssl all {user} 127.0.0.1/32 password clientcert=verify-ca");
    admit(&bed, &format!("{rules}\nhost all all 127.0.0.1/32 password")).await;
    let identified =
        url(&bed, "localhost", &format!("sslmode=verify-full&sslrootcert={}&{identity}", authority.path()));
    works(&mut bed, &identified).await;

    // These encrypt, and verify nobody; as with all clients of PostgreSQL.
    for mode in ["require", "prefer"] {
        let unverified = url(&bed, "localhost", &format!("sslmode={mode}&{identity}"));
        works(&mut bed, &unverified).await;
    }
    // The system's word counts, too, beside the file's.
    bed.set_variable("SSL_CERT_FILE", authority.path());
    for roots in [String::new(), format!("&sslrootcert={}", stranger.path())] {
        let trusted = url(&bed, "localhost", &format!("sslmode=verify-full&{identity}{roots}"));
        works(&mut bed, &trusted).await;
    }
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_fault_of_tls_is_named_with_its_way_out_and_told_apart_from_a_database_that_is_away() {
    let servers = Servers::start_postgres().await;
    let mut bed = servers.bed().await;
    bed.set("database.migrate_on_start", "false");
    let (authority, stranger) = (Authority::new("Authority"), Authority::new("Stranger"));
    let ca = authority.path().to_owned();
    let (good, nameless) = (authority.issue(&["localhost"]), authority.issue(&[]));
    let expired = authority.issue_expired(&["localhost"]);
    let (client, other) = (authority.issue(&[]), stranger.issue(&[]));
    let trusting = |roots: &str| format!("sslmode=verify-full&sslrootcert={roots}");
    let with = |certificate: &str, key: &str| format!("{}&sslcert={certificate}&sslkey={key}", trusting(&ca));
    let tls = "database.tls";

    let without = url(&bed, "localhost", "sslmode=require");
    let (check, finding, remedy) = fault(&mut bed, &without).await;
    assert_eq!(check, tls, "{finding}");
    assert!(finding.contains("server does not support TLS") && remedy.contains("sslmode"), "{finding}; {remedy}");

    for (identity, host, parameters, cause, remedy) in [
        (&good, "127.0.0.1", trusting(&ca), "not for 127.0.0.1, but for localhost", "as the host in DATABASE_URL"),
        (&good, "localhost", trusting(stranger.path()), "issued by nobody", "sslrootcert in DATABASE_URL"),
        (&good, "localhost", "sslmode=verify-full".to_owned(), "issued by nobody", "sslrootcert in DATABASE_URL"),
        (&good, "localhost", "sslmode=verify-ca".to_owned(), "issued by nobody", "sslrootcert in DATABASE_URL"),
        (&good, "localhost", trusting("/no/ca.pem"), "/no/ca.pem does not exist", "correct sslrootcert"),
        (&good, "localhost", trusting("/tmp"), "/tmp is a folder", "correct sslrootcert"),
        (&good, "localhost", trusting(client.key.path()), "no certificate", "correct sslrootcert"),
        (&good, "localhost", with("/no/c.pem", client.key.path()), "/no/c.pem does not exist", "correct sslcert"),
        (&good, "localhost", with(client.certificate.path(), "/no/k.pem"), "/no/k.pem does not", "correct sslkey"),
        (&good, "localhost", with(client.certificate.path(), &ca), "no private key", "correct sslkey"),
        (&good, "localhost", with(client.certificate.path(), other.key.path()), "the key in sslkey", "DATABASE_URL"),
        (&good, "localhost", with(other.certificate.path(), other.key.path()), "UnknownCA", "that it accepts"),
        (&nameless, "localhost", trusting(&ca), "has no host name (subjectAltName)", "have it issued for this host"),
        (&expired, "localhost", trusting(&ca), "expired at 2021-01-01T00:00:00Z", "renew it"),
    ] {
        serve(&bed, identity, &authority).await;
        let url = url(&bed, host, &parameters);
        let (check, finding, way_out) = fault(&mut bed, &url).await;
        assert_eq!(check, tls, "{url}: {finding}");
        assert!(finding.contains(cause) && way_out.contains(remedy), "{url}: {finding}; {way_out}");
    }

    serve(&bed, &good, &authority).await;
    let user = bed.demote().await;
    let rules = format!("hostssl all {user} 127.0.0.1/32 password clientcert=verify-ca");
    admit(&bed, &format!("{rules}\nhost all all 127.0.0.1/32 password")).await;
    let demanded = bed.variable("STOCK__DATABASE__URL").replace("127.0.0.1", "localhost");
    let (_, finding, remedy) = fault(&mut bed, &format!("{demanded}?{}", trusting(&ca))).await;
    assert!(
        finding.contains("requires a valid client certificate") && remedy.contains("sslcert"),
        "{finding}; {remedy}"
    );

    let mut nobody = url::Url::parse(&url(&bed, "localhost", &trusting("/no/ca.pem"))).expect("a URL");
    nobody.set_port(Some(1)).expect("a port");
    let (check, finding, _) = fault(&mut bed, nobody.as_str()).await;
    assert_eq!(check, "database.reachable", "{finding}");
    bed.finish().await;
}
