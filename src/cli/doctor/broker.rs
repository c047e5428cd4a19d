//! The broker and the queues: what is right with them, what is not, and the way out.

use std::time::Duration;

use super::super::PATIENCE;
use super::findings::{Findings, Level};
use crate::broker::examine::{self, Part, Product, Publishing, Refusal};
use crate::broker::{self, AmqpUrl, BrokerError, QueueType, Topology};
use crate::settings::Settings;
use crate::tls::TlsFault;

/// The broker's default for how long a message may wait for its acknowledgement.
const DEFAULT_CONSUMER_TIMEOUT: Duration = Duration::from_secs(30 * 60);

pub(super) async fn examine(settings: &Settings) -> Findings {
    let mut findings = Findings::default();
    let url = &settings.amqp.url;
    let found = async {
        judge_product(&within(examine::product(url)).await?, &mut findings);
        let connection = within(broker::connect(url, "doctor")).await?;
        findings.ok("broker.reachable", format!("{url}"));
        judge_tls(url, &mut findings);
        let topology = Topology::new(&settings.amqp, &settings.retry);
        let parts = examine::topology(&connection, &topology).await?;
        judge_topology(&parts, settings, &mut findings);
        if queue(&parts, topology.queue()).is_some() && !examine::may_read(&connection, topology.queue()).await? {
            findings.fail(
                "broker.rights",
                format!("the user may not read from the queue {}", topology.queue()),
                "give the right with rabbitmqctl set_permissions",
            );
        }
        judge_waiting(broker::oldest_waiting(&connection, &topology).await, settings, &mut findings);
        judge_consumer_timeout(settings, &mut findings);
        judge_publishing(examine::publishing(&connection, &topology).await?, &mut findings);
        tokio::time::timeout(Duration::from_secs(1), broker::close(&connection)).await.ok(); // blocked, it says no more
        Ok::<_, BrokerError>(())
    };
    let place = url.place();
    match found.await {
        Ok(()) => {}
        Err(BrokerError::Tls(TlsFault { cause, remedy })) => {
            findings.fail("broker.tls", format!("no connection by TLS to the broker at {place}: {cause}"), remedy);
        }
        Err(error) => {
            findings.fail("broker.reachable", format!("cannot examine the broker at {place}: {error}"), way_in(&error));
        }
    }
    findings
}

async fn within<T>(request: impl Future<Output = Result<T, BrokerError>>) -> Result<T, BrokerError> {
    tokio::time::timeout(PATIENCE, request).await.unwrap_or(Err(BrokerError::Silent(PATIENCE)))
}

/// What to do when the broker does not even let us look.
fn way_in(error: &BrokerError) -> &'static str {
    match error.refusal() {
        Refusal::Access => "correct user and password in AMQP_URL (amqp.url), or create the user: rabbitmqctl add_user",
        Refusal::Vhost => {
            "correct the vhost in AMQP_URL (amqp.url; / is written %2f), create it with rabbitmqctl add_vhost, or let \
             the user in with rabbitmqctl set_permissions"
        }
        Refusal::Mismatch | Refusal::Missing | Refusal::Other => {
            "correct host and port in AMQP_URL (amqp.url), start the broker, or open the way to it (listeners, \
             firewall, amqp or amqps)"
        }
    }
}

fn judge_tls(url: &AmqpUrl, findings: &mut Findings) {
    if url.is_secure() {
        findings.ok("broker.tls", "encrypted, and the broker is verified");
    } else if url.is_remote() {
        findings.warn(
            "broker.tls",
            "the password and all messages travel without TLS",
            "use amqps:// in AMQP_URL (amqp.url), unless you trust the network",
        );
    }
}

fn judge_product(product: &Product, findings: &mut Findings) {
    let Product { name, version } = product;
    let mut numbers = version.split('.').map_while(|part| part.parse::<u32>().ok());
    let release = (numbers.next(), numbers.next());
    let is_new_enough = name == "RabbitMQ" && release >= (Some(3), Some(10));
    match is_new_enough {
        true => findings.ok("broker.version", format!("{name} {version}")),
        false => findings.fail(
            "broker.version",
            format!("{name} {version} is not what the service is made for"),
            "use RabbitMQ 3.10 or newer",
        ),
    }
}

/// A queue that exists.
fn queue<'a>(parts: &'a [Part], name: &str) -> Option<&'a Part> {
    let name = format!("queue {name}");
    parts.iter().find(|part| part.name == name && !is_missing(part))
}

fn is_missing(part: &Part) -> bool {
    matches!(&part.state, Err(error) if error.refusal() == Refusal::Missing)
}

fn judge_topology(parts: &[Part], settings: &Settings, findings: &mut Findings) {
    let check = "broker.topology";
    let declares = settings.amqp.declare;
    let before = findings.0.len();
    let missing: Vec<_> = parts.iter().filter(|part| is_missing(part)).map(|part| part.name.as_str()).collect();
    if !missing.is_empty() {
        let finding = format!("missing: {}", missing.join(", "));
        match declares {
            true => findings.warn(check, finding, "`consume` declares it at its start, and again when it has vanished"),
            false => findings.fail(
                check,
                finding,
                "declare it as the documentation says, or let `consume` do so: amqp.declare = true",
            ),
        }
    }
    let mut not_compared = Vec::new();
    for Part { name, state, .. } in parts.iter().filter(|part| !is_missing(part)) {
        let Err(error) = state else { continue };
        match (error.refusal(), declares) {
            (Refusal::Access, true) => findings.fail(
                "broker.rights",
                format!("the user may not configure {name}, which amqp.declare = true needs"),
                "give the right with rabbitmqctl set_permissions, or declare everything yourself and set \
                 amqp.declare = false",
            ),
            (Refusal::Access, false) => not_compared.push(name.as_str()),
            (_, declares) => findings.add(
                if declares { Level::Error } else { Level::Warning },
                check,
                format!("{name} is not as the service would declare it: {error}"),
                "make it fit: a new queue or exchange, another name (amqp.queue, amqp.exchange) or type \
                 (amqp.queue_type); or take it, with its delay, dead-letter route and delivery limit, as it is with \
                 amqp.declare = false",
            ),
        }
    }
    if !not_compared.is_empty() {
        findings.ok(
            check,
            format!("there, but not compared, which takes the right to configure: {}", not_compared.join(", ")),
        );
    }
    if findings.0.len() == before {
        findings.ok(check, "exchange, queues, dead-letter routes, delays and delivery limits are as declared");
    }
    if !declares {
        findings.ok(
            "broker.bindings",
            format!(
                "cannot be asked for; {} must be bound to {} by every event's name",
                settings.amqp.queue, settings.amqp.exchange
            ),
        );
    }
    if settings.amqp.queue_type == QueueType::Classic {
        findings.warn(
            "broker.queue_type",
            "classic queues: a message that kills the process is delivered for ever, and what the broker moves may get \
             lost",
            "use new queues with amqp.queue_type = quorum",
        );
    }
    judge_messages(parts, settings, findings);
}

fn judge_messages(parts: &[Part], settings: &Settings, findings: &mut Findings) {
    let topology = Topology::new(&settings.amqp, &settings.retry);
    if let Some(Part { name, messages, consumers, .. }) = queue(parts, topology.queue()) {
        findings.ok("messages.waiting", format!("{name}: {messages} ready, {consumers} consumers"));
    }
    if let Some(Part { name, messages: messages @ 1.., .. }) = queue(parts, &topology.failure_queue()) {
        findings.warn(
            "messages.failed",
            format!("{name}: {messages} messages wait for a person"),
            "look at their failure-reason and failure-detail, mend the cause, and send them again or discard them",
        );
    }
}

fn judge_waiting(oldest: Result<Duration, BrokerError>, settings: &Settings, findings: &mut Findings) {
    let check = "purge.horizon";
    let purge = &settings.purge;
    let delays = settings.retry.all_delays();
    if purge.minimum_horizon < delays {
        findings.warn(
            check,
            "purge.minimum_horizon is shorter than all retry delays together: a copy may arrive after its event is \
             forgotten",
            "raise purge.minimum_horizon and purge.horizon, or lower retry.max_retries or retry.max_delay",
        );
    }
    let age = match oldest {
        Ok(age) => age,
        Err(error) => {
            findings.warn(
                check,
                format!("how old the waiting messages are cannot be seen: {error}"),
                "give the right to read the retry and failure queues; without it a purge relies on \
                 purge.minimum_horizon alone",
            );
            return;
        }
    };
    let days = |duration: Duration| format!("{:.1} days", duration.as_secs_f64() / 86_400.0);
    match purge.horizon < age + delays {
        true => findings.warn(
            check,
            format!(
                "the oldest waiting message is {} old, older than purge.horizon ({}) allows: the purge refuses to work",
                days(age),
                days(purge.horizon)
            ),
            "empty the failure queue, or raise purge.horizon",
        ),
        false => findings.ok(
            check,
            format!(
                "{}, longer than what waits may take: the oldest message is {} old, its retries take {delays:?}",
                days(purge.horizon),
                days(age)
            ),
        ),
    }
}

fn judge_consumer_timeout(settings: &Settings, findings: &mut Findings) {
    let check = "broker.consumer_timeout";
    // A transaction, and a second one after a wait for a lock; and as long again for each batch in the window before.
    let batches = usize::from(settings.consume.prefetch).div_ceil(settings.consume.batch_size) + 1;
    let longest = settings.database.timeout * 3 * u32::try_from(batches).unwrap_or(u32::MAX);
    let ask = "AMQP cannot ask for it: rabbitmqctl environment | grep consumer_timeout";
    match longest < DEFAULT_CONSUMER_TIMEOUT {
        true => findings.ok(
            check,
            format!("must be above {longest:?}, the longest until an acknowledgement; 30 min by default. {ask}"),
        ),
        false => findings.warn(
            check,
            format!(
                "must be above {longest:?}, the longest until an acknowledgement, and is 30 min by default: the broker \
                 would take messages away from a slow worker"
            ),
            format!(
                "raise consumer_timeout in rabbitmq.conf, or lower database.timeout or the ratio of consume.prefetch to \
                 consume.batch_size. {ask}"
            ),
        ),
    }
}

fn judge_publishing(publishing: Publishing, findings: &mut Findings) {
    match publishing {
        Publishing::Open => findings.ok("broker.publishing", "the broker takes messages, no alarm"),
        Publishing::Blocked(reason) => findings.fail(
            "broker.publishing",
            format!("the broker blocks publishing: {reason}"),
            "free memory or disk at the broker; until then copies of failed messages are held",
        ),
        Publishing::Forbidden => findings.fail(
            "broker.rights",
            "the user may not write to the default exchange, by which copies go to the retry and failure queues",
            "give the right to write to amq.default with rabbitmqctl set_permissions",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_rabbitmq_from_3_10_on_is_new_enough() {
        for (name, version, level) in [
            ("RabbitMQ", "3.10.0", Level::Ok),
            ("RabbitMQ", "3.13.7+rc.1", Level::Ok),
            ("RabbitMQ", "4.3.6", Level::Ok),
            ("RabbitMQ", "3.9.29", Level::Error),
            ("RabbitMQ", "", Level::Error),
            ("LavinMQ", "4.0.0", Level::Error),
        ] {
            let mut findings = Findings::default();
            judge_product(&Product { name: name.to_owned(), version: version.to_owned() }, &mut findings);
            assert_eq!(findings.0[0].level, level, "{name} {version}");
        }
    }

    #[test]
    fn a_way_to_another_host_without_tls_is_a_warning() {
        for (url, level) in [
            ("amqp://u:p@mq", Some(Level::Warning)),
            ("amqps://u:p@mq", Some(Level::Ok)),
            ("amqp://u:p@127.0.0.1", None),
        ] {
            let mut findings = Findings::default();
            judge_tls(&url.parse().unwrap(), &mut findings);
            assert_eq!(findings.0.first().map(|finding| finding.level), level, "{url}");
        }
    }
}
