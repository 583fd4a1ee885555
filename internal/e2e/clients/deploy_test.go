package clients

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/epochkv/epochkv/client"
)

var prometheusFlag = flag.String("deploy.prometheus", "", "the program prometheus, with which the dashboard and the rules are loaded (make test-deploy)")

const repository = "../../.."

func mustReadFile(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(repository, name))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// TestRulesAndDashboardUseMetricsThatExist: the table of docs/operations.md is generated from the code.
func TestRulesAndDashboardUseMetricsThatExist(t *testing.T) {
	t.Parallel()
	known := map[string]bool{}
	for _, m := range regexp.MustCompile("(?m)^\\| `(kvserver_[a-z_]+)").FindAllStringSubmatch(mustReadFile(t, "docs/operations.md"), -1) {
		known[m[1]] = true
	}
	used := 0
	for _, name := range []string{"deploy/prometheus/recording.yaml", "deploy/prometheus/alerts.yaml", "deploy/grafana/epochkv.json"} {
		for _, metric := range regexp.MustCompile(`kvserver_[a-z_]+`).FindAllString(mustReadFile(t, name), -1) {
			used++
			if !known[metric] && !known[strings.TrimSuffix(metric, "_bucket")] {
				t.Errorf("%s uses %s, which does not exist", name, metric)
			}
		}
	}
	if len(known) < 100 || used < 60 {
		t.Errorf("%d metrics are known, %d uses were looked at", len(known), used)
	}
}

// TestEveryAlertAndConditionIsInTheRunbook: an alert links to its section.
func TestEveryAlertAndConditionIsInTheRunbook(t *testing.T) {
	t.Parallel()
	runbook := mustReadFile(t, "docs/runbook.md")
	alerts := regexp.MustCompile(`(?m)- alert: (\w+)`).FindAllStringSubmatch(mustReadFile(t, "deploy/prometheus/alerts.yaml"), -1)
	links := regexp.MustCompile(`(?m)runbook: docs/runbook.md#(\w+)`).FindAllStringSubmatch(mustReadFile(t, "deploy/prometheus/alerts.yaml"), -1)
	if len(alerts) < 10 || len(links) != len(alerts) {
		t.Fatalf("%d alerts, %d links", len(alerts), len(links))
	}
	for i, a := range alerts {
		if !strings.Contains(runbook, "\n## "+a[1]+"\n") || links[i][1] != strings.ToLower(a[1]) {
			t.Errorf("the alert %s has no section, or links to %s", a[1], links[i][1])
		}
	}
	conditions := regexp.MustCompile("(?m)^\\| `([a-z-]+)` \\| (unavailable|degraded|warning) \\|").FindAllStringSubmatch(mustReadFile(t, "docs/operations.md"), -1)
	if len(conditions) < 10 {
		t.Fatalf("conditions: %v", conditions)
	}
	for _, c := range conditions {
		if !strings.Contains(runbook, "\n### "+c[1]+"\n") {
			t.Errorf("the condition %s has no section", c[1])
		}
	}
}

// TestDashboardHasDataInEveryPanel loads rules and dashboard into a real Prometheus beside a server that does some of everything.
func TestDashboardHasDataInEveryPanel(t *testing.T) {
	if *prometheusFlag == "" {
		t.Log("without -deploy.prometheus only the names are checked: see make test-deploy")
		return
	}
	metrics := freeAddress(t)
	s := startServer(t, "--http", metrics)
	ctx, stop := context.WithTimeout(t.Context(), 2*time.Minute)
	defer stop()
	done := make(chan struct{})
	go func() {
		defer close(done)
		doSomeOfEverything(ctx, s.dial(s.endpoint))
	}()
	p := startPrometheus(t, metrics)
	const rule = `epochkv:log_fsync_duration_seconds:p99_5m > 0` // one of the recording rules, which come later than the figures
	var missing []string
	for deadline := time.Now().Add(100 * time.Second); time.Now().Before(deadline); time.Sleep(3 * time.Second) {
		if missing = p.panelsWithoutData(t); len(missing) == 0 && len(p.query(t, rule)) > 0 {
			break
		}
	}
	for _, panel := range missing {
		t.Errorf("no data: %s", panel)
	}
	if firing := p.query(t, `ALERTS{alertstate="firing"}`); len(firing) > 0 {
		t.Errorf("alerts of a server that is well: %v", firing)
	}
	if rules := p.query(t, rule); len(rules) != 1 {
		t.Errorf("recording rules: %v", rules)
	}
	stop()
	<-done
}

// doSomeOfEverything keeps a server busy in all ways that the dashboard shows, until ctx ends.
func doSomeOfEverything(ctx context.Context, c *client.Client) {
	go func() {
		for _, err := range c.Watch(ctx, []client.Range{{}}, client.WatchOptions{}) {
			if err != nil {
				return
			}
		}
	}()
	lease, err := c.GrantLease(ctx, 2*time.Second, "dashboard")
	if err != nil {
		return
	}
	defer func() { _ = lease.Close(context.WithoutCancel(ctx)) }()
	for i := 0; ctx.Err() == nil; i++ {
		key := fmt.Appendf(nil, "key-%05d", i%20_000)
		_, _ = c.Put(ctx, key, bytes.Repeat(key, 20))
		_, _ = c.Get(ctx, key)
		_, _ = c.Get(ctx, []byte("no such key"))
		_, _ = c.Put(ctx, append(key, "-short"...), key, client.Expires(client.For(time.Second)))
		_ = c.Update(ctx, func(tx *client.Txn) error { return tx.Put(key, key) })
		if i%200 == 0 {
			_, _ = c.Checkpoint(ctx)
		}
	}
}

type prometheus struct{ address string }

func startPrometheus(t *testing.T, target string) *prometheus {
	t.Helper()
	dir := t.TempDir()
	config := strings.ReplaceAll(mustReadFile(t, "deploy/prometheus/prometheus.yaml"), "epochkv:7401", target)
	config = strings.NewReplacer("scrape_interval: 15s", "scrape_interval: 1s", "evaluation_interval: 30s", "evaluation_interval: 1s").Replace(config)
	for name, text := range map[string]string{
		"prometheus.yaml": config, "recording.yaml": strings.ReplaceAll(mustReadFile(t, "deploy/prometheus/recording.yaml"), "interval: 30s", "interval: 1s"),
		"alerts.yaml": mustReadFile(t, "deploy/prometheus/alerts.yaml"),
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	p := &prometheus{address: freeAddress(t)}
	var log bytes.Buffer
	program := exec.Command(*prometheusFlag, "--config.file="+filepath.Join(dir, "prometheus.yaml"), "--storage.tsdb.path="+filepath.Join(dir, "data"), "--web.listen-address="+p.address)
	program.Stdout, program.Stderr = &log, &log
	if err := program.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = program.Process.Kill()
		_ = program.Wait()
		if t.Failed() {
			t.Log(log.String())
		}
	})
	for deadline := time.Now().Add(startMax); time.Now().Before(deadline); time.Sleep(100 * time.Millisecond) {
		if response, err := http.Get("http://" + p.address + "/-/ready"); err == nil {
			_ = response.Body.Close()
			if response.StatusCode == http.StatusOK {
				return p
			}
		}
	}
	t.Fatal("Prometheus did not start")
	return nil
}

type series struct {
	Metric map[string]string `json:"metric"`
	Value  [2]any            `json:"value"`
}

func (p *prometheus) query(t *testing.T, expression string) []series {
	t.Helper()
	response, err := http.Get("http://" + p.address + "/api/v1/query?query=" + url.QueryEscape(expression))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = response.Body.Close() }()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	var answer struct {
		Status string `json:"status"`
		Data   struct {
			Result []series `json:"result"`
		} `json:"data"`
	}
	if err := json.Unmarshal(body, &answer); err != nil || answer.Status != "success" {
		t.Fatalf("%s: %v: %s", expression, err, body)
	}
	return slices.DeleteFunc(answer.Data.Result, func(s series) bool { return s.Value[1] == "NaN" })
}

// panelsWithoutData asks Prometheus what each panel of the dashboard would.
func (p *prometheus) panelsWithoutData(t *testing.T) (missing []string) {
	t.Helper()
	var dashboard struct {
		Panels []struct {
			Title   string `json:"title"`
			Targets []struct {
				Expr string `json:"expr"`
			} `json:"targets"`
		} `json:"panels"`
	}
	if err := json.Unmarshal([]byte(mustReadFile(t, "deploy/grafana/epochkv.json")), &dashboard); err != nil {
		t.Fatal(err)
	}
	asked := 0
	for _, panel := range dashboard.Panels {
		for _, target := range panel.Targets {
			asked++
			if len(p.query(t, strings.NewReplacer("$instance", ".*", "$__rate_interval", "15s").Replace(target.Expr))) == 0 {
				missing = append(missing, panel.Title+": "+target.Expr)
			}
		}
	}
	if asked < 50 {
		t.Fatalf("only %d queries", asked)
	}
	return missing
}
