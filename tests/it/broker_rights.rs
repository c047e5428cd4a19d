//! The broker refuses the login, the vhost, or a single right; the service says so, asks slowly, and goes on by itself.

use std::time::Duration;

use tokio::time::Instant;

use crate::support::{Order, Process, Proxy, Servers, TestBed, eventually};

/// A user of the test's own, with no right yet; its name.
async fn user(servers: &Servers, bed: &TestBed) -> String {
    let user = format!("{}_user", bed.database_name());
    servers.rabbitmqctl(&["add_user", &user, "S3CR3T-user"]).await;
    user
}

/// Has the service log in like this, by way of a proxy that counts.
async fn log_in(bed: &mut TestBed, user: &str, password: &str, vhost: &str) -> Proxy {
    let mut url = url::Url::parse(bed.variable("AMQP_URL")).expect("a URL");
    url.set_username(user).expect("a user");
    url.set_password(Some(password)).expect("a password");
    url.set_path(vhost);
    let proxy = Proxy::before(url.as_str()).await;
    bed.set("amqp.url", proxy.url());
    proxy
}

async fn ends(service: Process) {
    service.signal("TERM").await;
    let end = service.end().await;
    assert_eq!(end.code(), Some(0), "{}", end.stderr);
    assert!(!end.stderr.contains("S3CR3T"), "{}", end.stderr);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_login_is_named_tried_slowly_and_over_when_it_is_granted() {
    const ATTEMPTS: usize = 4;

    let servers = Servers::start_rabbitmq().await;
    let mut bed = servers.bed().await;
    let user = user(&servers, &bed).await;
    for (refusal, password, vhost, words) in [
        ("a wrong password", "S3CR3T-wrong", "%2f", "ACCESS_REFUSED"),
        ("no right on the vhost", "S3CR3T-user", "%2f", &user),
        ("a missing vhost", "S3CR3T-user", &user, &user),
    ] {
        let proxy = log_in(&mut bed, &user, password, vhost).await;
        let begun = Instant::now();
        let mut service = bed.spawn(&["consume"]);
        service.has_said(words).await;
        eventually("it tries again", async || proxy.accepted() >= ATTEMPTS).await;
        // Pauses of 1, 2 and 4 seconds, which grow to ten attempts a minute.
        assert!(begun.elapsed() > Duration::from_secs(6), "{ATTEMPTS} attempts in {:?}: {refusal}", begun.elapsed());
        assert!(service.is_running(), "{refusal}");
        match refusal {
            "a wrong password" => servers.rabbitmqctl(&["change_password", &user, password]).await,
            "no right on the vhost" => servers.rabbitmqctl(&["set_permissions", &user, ".*", ".*", ".*"]).await,
            _ => servers.rabbitmqctl(&["add_vhost", vhost]).await,
        };
        if refusal == "a missing vhost" {
            servers.rabbitmqctl(&["set_permissions", "-p", vhost, &user, ".*", ".*", ".*"]).await;
        }
        match refusal {
            // The right password is not enough.
            "a wrong password" => service.has_said("refused for user").await,
            _ => service.has_said("\"consuming\"").await,
        }
        ends(service).await;
        servers.rabbitmqctl(&["change_password", &user, "S3CR3T-user"]).await;
    }
    bed.finish().await;
}

/// The rights that the docs ask for without declarations, and nothing more; and then one less.
#[tokio::test(flavor = "multi_thread")]
async fn a_user_who_may_only_read_the_queue_and_publish_is_enough_and_less_holds_what_needs_it() {
    let servers = Servers::start_rabbitmq().await;
    let mut bed = servers.bed().await;
    let user = user(&servers, &bed).await;
    let read = format!("^{}$", bed.broker.queue().replace('.', "\\."));
    servers.rabbitmqctl(&["set_permissions", &user, "^$", "^$", &read]).await;
    let _proxy = log_in(&mut bed, &user, "S3CR3T-user", "%2f").await;
    bed.set("amqp.declare", "false");
    bed.set_ladder(1, 50);
    bed.on_reservation("if new.quantity = 666 then raise 'scripted'; end if;").await;
    let service = bed.spawn(&["consume"]);
    let (retried, innocents) = (Order::of("666"), Order::many(10));
    bed.broker.publish_all(Order::EVENT, ["no event".to_owned(), retried.body()]).await;
    bed.broker.publish_all(Order::EVENT, innocents.iter().map(Order::body)).await;
    bed.has_processed(10).await; // nobody else is held up
    service.has_said("copy not placed").await;
    servers.rabbitmqctl(&["set_permissions", &user, "^$", "^amq\\.default$", &read]).await;
    let failed = bed.broker.failed(2).await;
    assert_eq!(failed.iter().filter(|copy| copy.body == retried.body().as_bytes()).count(), 1, "after its retry");
    ends(service).await;
    assert_eq!((bed.broker.in_work().await, bed.reservations().await), (0, 10));
    bed.finish().await;
}
