# EpochKV. `make run` starts a server on ./data, `make test` runs every test; `make help` lists the rest.

SHELL       := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS   += --no-builtin-rules

GO    ?= go
# Tools are pinned in modules of their own, so that none of their dependencies reaches the server's go.mod. golangci-lint has
# one to itself: its authors advise against sharing. The Go build cache keeps the built tools. They are not run by `go tool`, which ignores -gcflags
# in GOFLAGS: with other flags than the tests all that both import would be compiled twice.
BUF   := $(GO) run -modfile=$(CURDIR)/tools/go.mod github.com/bufbuild/buf/cmd/buf
# With less garbage collection the compiler and golangci-lint need a fifth less processor time. Tests run with the usual one.
LESS_GC := env GOGC=400 GOMEMLIMIT=4GiB
LINT  := $(LESS_GC) $(CURDIR)/tools/lint/golangci-lint.sh
# Modules of this repository: the server, and what must stay out of its go.mod.
MODULES := . bench bench/peers/etcdserver examples/sqliteview tools tools/deploycheck tools/lint

ARGS         ?=
FUZZTIME     ?= 1s
TEST_TIMEOUT ?= 8m
# Most tests wait, for timers, deadlines and devices: three packages at a time, and the server's, keep two processors busy. The storm has the
# processors for itself, because it measures memory in use, which is more while the collector lacks time.
AT_ONCE      ?= 3
STORM        := ./internal/e2e/storm
# All packages but those that options of grep match, and those of LONGEST that are named. What takes longest comes first, so that nothing runs alone at the end.
LONGEST      := ./internal/enginetest ./internal/restore ./internal/mvcc ./cmd/kvctl ./internal/backup ./internal/archive
packages     = $(filter-out $(2),$(LONGEST)) $$($(GO) list ./... | grep -v -e '/internal/server$$' $(1) $(patsubst .%,-e '%$$',$(LONGEST)) | tr '\n' ' ')
TOGETHER     = $(call packages,-e '/internal/e2e/storm$$')
# About half of the server's tests.
SERVER_PART  := ^Test[A-L]
# What keeps memory outside the heap: pages, memtables, buffers of the log. The race detector has it on the heap.
OFF_HEAP     := ./internal/cache ./internal/storage/memtable ./internal/storage/pager ./internal/wal ./internal/offheap
# The engine's other packages, and their tests that are not run under the race detector.
ENGINE       := ./internal/enginetest ./internal/mvcc ./internal/storage ./internal/storage/btree
NOT_RACED     = $$(git grep --untracked -hE '^func Test|SkipUnderRace\(' -- $(ENGINE:./%='%/*_test.go') | sed -n -e '/^func/{s/func //;s/(.*//;h;d;}' -e '{x;p;x;}' | paste -sd '|')
SEED         := $(or $(SEED),$(shell date +%s%N))
BENCH_BUDGET ?= 20m
YIELD        ?=
# The server's tests run on the default transport, and on grpc-go only where the path of a request differs: pipelines, messages that are
# received in parts or not at all, streams and answers of stuck clients, deadlines, shutdown. Left out is what both share: conditions, scans,
# transactions, snapshots, tokens, limits of the engine, states of the throttle, metrics. Tests of idle streams start both transports themselves.
# TestTransportsAnswerAlike compares both in every run.
GRPC_GO_TESTS      := (?i:pipeline|inbound|message|unread|stream|drain|stuck|deadline|cancel|late|connection|tls|certificate)|GiveUpStop|StopsReceiving|Stopped|Systemd
GRPC_GO_RACE_TESTS := (?i:pipeline|inbound|unread|drain)
# What crashes, damages and fills disks at one place after the other: `make test` runs it, and `make crash` with the assertions and fresh
# seeds. The race detector would only make it slower: a store before a crash does what all other tests of it do. The programs' tests have no
# seeds: make test runs them, and test-invariants those with servers. Those of internal/e2e kill a binary without the assertions.
CRASH_WORDS        := crash|kill|torn|damage|corrupt|nospace|failstop
CRASH_TESTS        := (?i:$(CRASH_WORDS))
CRASH_PACKAGES      = $$(git grep --untracked -liE '^func Test.*($(CRASH_WORDS))' -- '*_test.go' ':!bench' ':!examples' ':!cmd' ':!internal/e2e' | xargs -n1 dirname | sort -u | sed 's|^|./|')
TEST         := $(GO) test -vet=off
# Compiles packages and their tests, as $(TEST) with the same options would.
COMPILE      := $(LESS_GC) $(GO) list -export -test -deps
# The race detector makes the collector slow: with GOGC=400 the tests needed 7 % less processor time. 200 bounds their memory: up to six processes run, which collect more
# often above 1.5 GiB each.
RACE         := CGO_ENABLED=1 GOGC=200 GOMEMLIMIT=1500MiB $(TEST) -race -tags invariants -timeout 30m
# Without the race detector, the assertions and the baselines of the benchmarks are built at once, so that all is compiled once for both.
ALL_TAGS     := -tags 'invariants ablation'
ASSERTED     := $(TEST) $(ALL_TAGS)
# The race detector finds nothing where neither the code nor a test starts a goroutine, and where a model of one goroutine tests what others share.
# The tests of internal/e2e drive binaries without the detector: it would watch their own clients, as it does in the tests of client. Restoring
# reads files and loads a store that nothing else uses yet.
ALONE         := /internal/\(ablation\|auth\|console\|doctable\|health\|invariants\|keys\|lint\|metadata\|offheap\|testseed\|storage/\(batch\|bitset\|orphans\|page\|pagesource\|quarantine\|repairtree\|throttle\)\)$$
RACE_PACKAGES  = $(call packages,-e '/internal/e2e' -e '$(ALONE)' -e '/api/' -e '/client/tracing$$' -e '/examples/',./internal/restore)
PEERS_BUDGET ?= 10m

##@ Use

run: build ## Build and start kvserver on ./data (more flags: make run ARGS="--memory 4GiB")
	exec bin/kvserver --data-dir ./data $(ARGS)

build: ## Build bin/kvserver and bin/kvctl
	$(GO) build -o bin/ ./cmd/...

clean: ## Remove binaries, caches and benchmark scratch (never ./data)
	rm -rf bin .cache bench/results/tmp

##@ Test

# The server's tests mostly wait: they run in processes of their own beside those of the other packages (tools/together.sh). All would
# compile the same packages at the same time, so that is done before. `make lint` has the analyzers that go test would run.
test: ## Run every test of the server module
	@$(COMPILE) ./... >/dev/null
	tools/together.sh "$(TEST) -p $(AT_ONCE) -timeout $(TEST_TIMEOUT) $(TOGETHER)" \
		"$(TEST) -timeout $(TEST_TIMEOUT) ./internal/server -run '$(SERVER_PART)'" \
		"$(TEST) -timeout $(TEST_TIMEOUT) ./internal/server -skip '$(SERVER_PART)'" \
		"$(TEST) -timeout $(TEST_TIMEOUT) ./internal/server -transport grpc-go -run '$(GRPC_GO_TESTS)' -skip '^TestIdle' && $(TEST) -timeout $(TEST_TIMEOUT) ./internal/transport -tls"
	$(TEST) -timeout $(TEST_TIMEOUT) $(STORM)

# The compilation that race begins with. With YIELD, .ci/run has it run beside tests that wait.
compile-race:
	@CGO_ENABLED=1 $(YIELD) $(COMPILE) -race -tags invariants $(RACE_PACKAGES) ./internal/server >/dev/null

race: compile-race ## Run the tests under the race detector and with the expensive assertions, the server's with users checked (see RACE_PACKAGES and CRASH_TESTS)
	tools/together.sh "$(RACE) -p $(AT_ONCE) -skip '$(CRASH_TESTS)' $(RACE_PACKAGES)" \
		"$(RACE) -skip '$(CRASH_TESTS)' ./internal/server -users -run '$(SERVER_PART)'" \
		"$(RACE) -skip '$(CRASH_TESTS)|$(SERVER_PART)' ./internal/server -users" \
		"$(RACE) ./internal/server -transport grpc-go -run '$(GRPC_GO_RACE_TESTS)'"

# The race detector has run all other tests with the assertions, the server's with users.
test-invariants: ## Run with the expensive assertions and without the race detector what keeps memory outside the heap, and the engine's tests that were not run under it; the tests of the server's programs also with users
	tools/together.sh "$(ASSERTED) -p $(AT_ONCE) -timeout $(TEST_TIMEOUT) -skip '$(CRASH_TESTS)' $(OFF_HEAP) && \
			$(ASSERTED) -p $(AT_ONCE) -timeout $(TEST_TIMEOUT) -run \"^($(NOT_RACED))\$$\" $(ENGINE)" \
		"$(ASSERTED) -timeout 15m ./internal/e2e/clients -users"

# As compile-race, for crash and test-invariants.
compile-asserted:
	@$(YIELD) $(COMPILE) $(ALL_TAGS) $(CRASH_PACKAGES) $(OFF_HEAP) $(ENGINE) ./internal/e2e/clients >/dev/null

crash: ## Run the crash, damage and full-disk tests again, uncached, with fresh seeds and with the expensive assertions (SEED=N repeats a run)
	@echo "seeds begin at EPOCHKV_SEED=$(SEED)"
	EPOCHKV_SEED=$(SEED) $(ASSERTED) -count=1 -timeout $(TEST_TIMEOUT) -run '$(CRASH_TESTS)' $(CRASH_PACKAGES)

fuzz-smoke: ## Fuzz every fuzz target for FUZZTIME (1s), two at a time
	tools/fuzz-smoke.sh $(FUZZTIME)

test-python: build ## Drive the real server from Python (grpcio; needs python3 and a package index)
	tools/test-python.sh

test-clients: build ## Drive the real server from Python, Node, Java, Rust, Ruby, curl, grpcurl, ghz, openssl and a view in SQLite, the first also over mutual TLS (needs their tools and package indexes; CLIENTS="python node" chooses)
	tools/test-clients.sh

test-proxy: ## Drive the Go client and kvctl through nginx, with servers that drain and are killed (needs nginx)
	tools/test-proxy.sh

test-h2spec: build ## Compare what fails of h2spec, on both transports, with the lists in tools/h2spec (builds h2spec from the Go module proxy)
	tools/test-h2spec.sh

test-deploy: ## Read deploy/ as its programs do, test the alerts with promtool, and every query of the dashboard with a real Prometheus (downloads it on Debian)
	tools/test-deploy.sh

test-console: build ## Open the console in a headless Chromium: three widths, light and dark, by keyboard, under axe (needs Chromium, Node and a package index)
	tools/test-console.sh

test-s3: ## Back up, archive and restore through a real S3-compatible server, which is killed meanwhile, as the server is (builds Versity's gateway from the Go module proxy)
	tools/test-s3.sh

##@ Measure

bench: ## Compare EpochKV with its peers; results, tables and charts go to bench/results/runs
	cd bench && $(GO) run -tags ablation ./cmd/epochbench -skip '^(peers|watch)-' -budget $(BENCH_BUDGET) -out results/runs $(ARGS)

bench-large: ## The scenarios that are scaled down otherwise, at the sizes that their figures ask for (about an hour, 4 GiB of disk)
	cd bench && $(GO) run -tags ablation ./cmd/epochbench -skip '^(peers|watch)-' -large -out results/runs $(ARGS)

bench-peers: ## Compare the server with etcd and Redis (when installed) over the wire, a process each; results as above
	$(GO) build -C bench/peers/etcdserver -o $(CURDIR)/bench/results/tmp/bin/etcdserver .
	cd bench && $(GO) run ./cmd/epochbench -run '^(peers|watch)-' -budget $(PEERS_BUDGET) -out results/runs $(ARGS)

bench-record: ## Make the files of bench/results that are committed from the runs in bench/results/runs
	cd bench && $(GO) run ./cmd/epochbench -record results results/runs/*.json

compile-bench:
	@cd bench && $(YIELD) $(COMPILE) $(ALL_TAGS) ./... >/dev/null

# The tests of bench do not run the scenarios over the wire: epochbench does, with all others.
bench-smoke: compile-bench ## Run every benchmark scenario for a moment: they must run and verify, speed is not judged
	tools/together.sh "cd bench && $(GO) run $(ALL_TAGS) ./cmd/epochbench -smoke -out results/tmp" \
		"cd bench && $(ASSERTED) -timeout $(TEST_TIMEOUT) -skip EveryScenarioRunsAndVerifies ./..." \
		"$(ASSERTED) -timeout $(TEST_TIMEOUT) -run 'EveryWayOfPruning|IncrementsBy' ./internal/mvcc && $(ASSERTED) -timeout $(TEST_TIMEOUT) -run InvokeAll ./internal/storage/btree"

##@ Check

fmt: ## Format all Go code (gofumpt, gci)
	for m in . bench; do (cd $$m && $(LINT) fmt --config $(CURDIR)/.golangci.yml); done

fmt-check: ## Fail if any Go code is not formatted
	for m in . bench; do (cd $$m && $(LINT) fmt --diff --config $(CURDIR)/.golangci.yml); done

# The linters see the code with the tags of assertions and baselines. What is there only without the tags, five small files, is compiled by make test.
# Govet has every analyzer of go vet.
lint: ## golangci-lint on the server and the bench module, with assertions and baselines
	$(LINT) run --build-tags invariants,ablation ./...
	cd bench && $(LINT) run --config ../.golangci.yml --build-tags invariants,ablation ./...

lint-advice: ## Report long and complex functions; advice, never a failure
	$(LINT) run --default none --enable funlen --enable gocyclo --issues-exit-code 0 ./...

deadcode: ## Fail if the functions that no command reaches differ from the reviewed list (tools/deadcode.txt)
	tools/deadcode.sh

vulncheck: ## Known vulnerabilities in what the server calls (needs the Go vulnerability database)
	tools/vulncheck.sh

tidy-check: ## Fail if a go.mod or go.sum is not tidy
	for m in $(MODULES); do echo "$$m"; (cd $$m && $(GO) mod tidy -diff); done

##@ Wire contract

generate: ## Generate the Go code of the wire contract, and the tables in docs
	$(BUF) generate
	$(BUF) generate --template buf.gen.hot.yaml
	$(GO) test -count=1 -run 'TableIsThatOf' ./internal/config ./internal/telemetry ./internal/lint ./internal/server -args -doctable.update
	$(BUF) lint
	tools/wire-check.sh --update

wire-check: ## Fail if the contract or the generated code are not those that make generate left; if so, says whether they are linted and current
	tools/wire-check.sh

generate-check: ## Fail if the committed generated code is not current
	tools/generate-check.sh

buf-lint: ## Lint the .proto files
	$(BUF) lint

buf-breaking: ## Fail if the wire contract breaks the newest tag's (before the first tag: the last commit's)
	tools/buf-breaking.sh

##@ All

ci: fmt-check lint test test-invariants race crash fuzz-smoke generate-check buf-lint wire-check buf-breaking tidy-check deadcode vulncheck bench-smoke ## Every check there is, but those that need a package index

help: ## This list
	@awk 'BEGIN {FS = ":.*## "} \
		/^##@/ {printf "\n%s\n", substr($$0, 5)} \
		/^[a-z0-9-]+:.*## / {printf "  %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: run build clean test compile-race race compile-asserted compile-bench test-invariants crash fuzz-smoke test-python test-clients test-proxy test-h2spec test-deploy test-console test-s3 bench bench-large bench-peers bench-record bench-smoke fmt fmt-check lint \
	lint-advice deadcode vulncheck tidy-check generate generate-check wire-check buf-lint buf-breaking ci help
