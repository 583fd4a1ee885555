# Drives a running server from Ruby with stubs that are generated from the .proto files: ruby tour.rb ENDPOINT
# Puts, gets, errors with their reasons, a large value, scans, a transaction, a pipeline, a watch and a deadline.

require "google/protobuf/well_known_types"
require "google/rpc/error_details_pb"
require "epochkv/v1/kv_services_pb"
require "epochkv/v1/transactions_services_pb"
require "epochkv/v1/feed_services_pb"

include Epochkv::V1

ENDPOINT = ARGV.fetch(0)
KV = KVService::Stub.new(ENDPOINT, :this_channel_is_insecure, timeout: 20)
TRANSACTIONS = TransactionService::Stub.new(ENDPOINT, :this_channel_is_insecure, timeout: 20)
FEED = FeedService::Stub.new(ENDPOINT, :this_channel_is_insecure, timeout: 20)

def check(what, holds)
  holds or abort "ruby: #{what}"
end

# The reason of the error that the block ends with.
def reason
  yield
  nil
rescue GRPC::BadStatus => e
  any = e.to_rpc_status.details.find { |d| d.is(Google::Rpc::ErrorInfo) }
  any ? any.unpack(Google::Rpc::ErrorInfo).reason : e.class.name
end

# The requests of a stream, which is open until close is called.
class Requests
  def initialize = @queue = Queue.new
  def send(request) = @queue << request
  def close = @queue.close

  def each
    while (request = @queue.pop)
      yield request
    end
  end

  include Enumerable
end

epoch = KV.put(PutRequest.new(key: "ruby/a", value: "1")).epoch
got = KV.get(GetRequest.new(key: "ruby/a"))
check "a value comes back", got.found && got.value == "1" && got.epoch == epoch
check "a missing key is not found", !KV.get(GetRequest.new(key: "ruby/none")).found
check "a key that is too long has its reason", reason { KV.put(PutRequest.new(key: "k" * 5000)) } == "KEY_TOO_LARGE"

large = Random.new(1).bytes(8 << 20)
big = KVService::Stub.new(ENDPOINT, :this_channel_is_insecure, timeout: 20, channel_args: { "grpc.max_receive_message_length" => 64 << 20 })
big.put(PutRequest.new(key: "large", value: large))
check "a large value comes back", big.get(GetRequest.new(key: "large")).value == large

requests = Requests.new
answers = KV.pipeline(requests.lazy)
1000.times { |i| requests.send(PipelineRequest.new(id: i, put: PutRequest.new(key: format("ruby/p%04d", i), value: i.to_s))) }
requests.close
check "a pipeline answers each request once", answers.map(&:id).sort == (0...1000).to_a

keys = KV.scan(ScanRequest.new(range: KeyRange.new(prefix: "ruby/p"), page_bytes: 4096)).flat_map { |page| page.entries.map(&:key) }
check "a scan has all keys in order", keys == (0...1000).map { |i| format("ruby/p%04d", i) }

requests = Requests.new
answers = TRANSACTIONS.transact(requests.lazy)
requests.send(TransactRequest.new(begin: BeginRequest.new))
check "a transaction begins", answers.next.begin
requests.send(TransactRequest.new(get: KeyReadRequest.new(key: "ruby/a")))
check "a transaction reads", answers.next.get.value == "1"
requests.send(TransactRequest.new(write: WriteRequest.new(mutations: [Mutation.new(kind: :KIND_PUT, key: "ruby/a", value: "2")])))
check "a transaction writes", answers.next.write
requests.send(TransactRequest.new(commit: CommitRequest.new))
committed = answers.next.commit
requests.close
check "a transaction commits", committed && KV.get(GetRequest.new(key: "ruby/a")).value == "2"

requests = Requests.new
updates = FEED.watch(requests.lazy)
requests.send(WatchRequest.new(create: CreateWatch.new(watch_id: 7, ranges: [KeyRange.new(prefix: "ruby/w")])))
check "a watch begins", updates.next.created
KV.put(PutRequest.new(key: "ruby/w1", value: "seen"))
update = updates.next
update = updates.next until update.changes
event = update.changes.commits[0].events[0]
check "a watch has the change", [event.key, event.value] == ["ruby/w1", "seen"]
requests.send(WatchRequest.new(cancel: CancelWatch.new(watch_id: 7)))
update = updates.next
update = updates.next until update.ended
requests.close

forever = Requests.new
check "a deadline ends a stream", begin
  FEED.watch(forever.lazy, deadline: Time.now + 0.3).each { |_| nil }
  false
rescue GRPC::DeadlineExceeded, GRPC::Cancelled
  true
end
forever.close

puts "ruby: everything is as expected"
