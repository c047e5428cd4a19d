# The image of stock-service (target `service`, the default), and that of the demo's other
# side (target `order-service`). It needs BuildKit, which every Docker since 23 builds with.
#
#   docker build -t stock-service .
#
# Nothing here names an architecture: amd64 and arm64 build alike, each on a machine of its
# own kind.

FROM rust:1.95-slim-trixie AS build
WORKDIR /src
COPY . .
# The caches keep what was downloaded and the dependencies that were built. The package
# itself is always built anew: cargo would go by the files' times, which a checkout or an
# archive may set to anything.
ARG TARGETARCH
RUN --mount=type=cache,target=/usr/local/cargo/registry \
    --mount=type=cache,target=/src/target,id=stock-service-target-${TARGETARCH} \
    cargo clean --locked --release --package stock-service \
    && cargo build --locked --release --bin stock-service --example order_service \
    && install -D --target-directory=/out target/release/stock-service target/release/examples/order_service \
    # Line numbers would be four fifths of the image. Backtraces keep the functions' names.
    && strip --strip-debug /out/*

# Of the same Debian release, so that its C library is not older than the builder's.
# It has root certificates, and neither a shell nor a package manager.
FROM gcr.io/distroless/cc-debian13:nonroot AS runtime
WORKDIR /
# As a number, which is what `runAsNonRoot` can check. Any other will do as well.
USER 65532:65532
STOPSIGNAL SIGTERM

FROM runtime AS order-service
COPY --from=build /out/order_service /usr/local/bin/order-service
ENTRYPOINT ["order-service"]
CMD ["play"]

FROM runtime AS service
COPY --from=build /out/stock-service /usr/local/bin/stock-service
# Listens to the container's network, of which nothing is published by itself. The stack is
# that of threads which name no size, as the AMQP client's do: a header that is nested a
# thousand levels deep overflows the usual 2 MiB. It is reserved, not used.
ENV STOCK__HTTP__LISTEN=0.0.0.0:9464 \
    RUST_MIN_STACK=67108864
EXPOSE 9464
HEALTHCHECK --interval=10s --timeout=12s --start-period=30s CMD ["stock-service", "health"]
ENTRYPOINT ["stock-service"]
CMD ["consume"]
LABEL org.opencontainers.image.title="stock-service" \
    org.opencontainers.image.description="Reserves the goods of every placed order in PostgreSQL, exactly once in effect, from a RabbitMQ queue that delivers at least once" \
    org.opencontainers.image.licenses="MIT OR Apache-2.0" \
    org.opencontainers.image.base.name="gcr.io/distroless/cc-debian13:nonroot"
