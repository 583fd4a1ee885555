# Builds static binaries and puts them into an image without a shell. docker build -t epochkv .
#
#   docker run -v epochkv:/data -v ./server-tls:/tls:ro -p 7400:7400 epochkv --tls-cert=/tls/server.crt --tls-key=/tls/server.key \
#     --tls-client-ca=/tls/ca.crt --tls-client-auth=require
#   docker run -v epochkv:/data -p 127.0.0.1:7400:7400 epochkv --insecure        # a trial: this machine alone reaches the port
#
# The address in a container is not loopback, so that the server starts only with one of these. kvctl tls init makes the files:
# copy server.crt, server.key and ca.crt, but not ca.key, to ./server-tls, and let user 65532 read them (chown).
#
# The history (.git) is part of the build context, so that kvserver --version names the commit.
FROM golang:1.26 AS build
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY . .
RUN CGO_ENABLED=0 go build -trimpath -ldflags=-s -o /out/ ./cmd/kvserver ./cmd/kvctl \
 && mkdir /out/data

FROM gcr.io/distroless/static-debian12:nonroot
COPY --from=build /out/kvserver /out/kvctl /usr/bin/
COPY --from=build --chown=65532:65532 --chmod=700 /out/data /data
USER 65532:65532
VOLUME /data
EXPOSE 7400 7401
# With TLS, kvctl needs KVCTL_TLS_CA, KVCTL_TLS_CERT and KVCTL_TLS_KEY in the environment.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s CMD ["/usr/bin/kvctl", "health"]
ENTRYPOINT ["/usr/bin/kvserver", "--data-dir=/data", "--listen=0.0.0.0:7400", "--http=0.0.0.0:7401"]
