"""A Kubernetes cluster in the namespaces of isolation.py: etcd and the control plane as processes, and nodes with kubelet,
kube-proxy, containerd and runc, each in a network and a mount namespace of its own, joined by a bridge.
"""

import ipaddress
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time
import urllib.request

import isolation

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TOOLS = ROOT / "target/ci/kubernetes"
BIN = TOOLS / "bin"
PACKAGES = TOOLS / "packages/root"
RUN = TOOLS / "run"
BRIDGE = "cluster"
CONTROL = "10.0.0.1"
SERVICES = "10.96.0.0/16"
PODS = "10.244.0.0/16"
API = f"https://{CONTROL}:6443"
READY_SECONDS = 180
# What a kubelet would set for the whole machine: it finds these values set already, and the machine stays as it is.
SYSCTLS = {
    "vm/overcommit_memory": "1", "vm/panic_on_oom": "0", "kernel/panic": "10", "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000", "kernel/keys/root_maxbytes": "25000000",
}


def command(*words, **options):
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, check=False, **options)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, words))}: {done.stderr.strip()}{done.stdout.strip()}")
    return done.stdout


def wait(what, condition, seconds=READY_SECONDS, interval=0.25):
    """Waits until the condition has a value other than None or False, and returns it."""
    start, last = time.monotonic(), None
    while time.monotonic() < start + seconds:
        try:
            if value := condition():
                return value
            last = value
        except (RuntimeError, OSError, KeyError, IndexError, ValueError) as error:
            last = error
        time.sleep(interval)
    raise RuntimeError(f"{what}: not within {seconds} s; at last: {last}")


class Certificates:
    """A CA, and the certificates that it signs, for the life of the cluster."""

    def __init__(self, folder):
        self.folder = folder
        folder.mkdir(parents=True)
        self.key("ca")
        command("openssl", "req", "-x509", "-new", "-key", folder / "ca.key", "-subj", "/CN=cluster", "-days", 2,
                "-out", folder / "ca.crt")
        self.ca = folder / "ca.crt"

    def key(self, name):
        command("openssl", "genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256",
                "-out", self.folder / f"{name}.key")
        return self.folder / f"{name}.key"

    def sign(self, name, subject, names=()):
        key, request, certificate = self.key(name), self.folder / f"{name}.csr", self.folder / f"{name}.crt"
        kinds = [f"{'IP' if item[0].isdigit() else 'DNS'}:{item}" for item in names]
        extensions = self.folder / f"{name}.ext"
        alternatives = f"subjectAltName={','.join(kinds)}\n" if kinds else ""
        extensions.write_text(f"extendedKeyUsage=clientAuth,serverAuth\n{alternatives}")
        command("openssl", "req", "-new", "-key", key, "-subj", subject, "-out", request)
        command("openssl", "x509", "-req", "-in", request, "-CA", self.ca, "-CAkey", self.folder / "ca.key", "-CAcreateserial",
                "-days", 2, "-extfile", extensions, "-out", certificate)
        return certificate, key

    def kubeconfig(self, name, subject):
        certificate, key = self.sign(name, subject)
        file = self.folder / f"{name}.kubeconfig"
        file.write_text(json.dumps({
            "apiVersion": "v1", "kind": "Config", "current-context": "cluster",
            "clusters": [{"name": "cluster", "cluster": {"server": API, "certificate-authority": str(self.ca)}}],
            "users": [{"name": name, "user": {"client-certificate": str(certificate), "client-key": str(key)}}],
            "contexts": [{"name": "cluster", "context": {"cluster": "cluster", "user": name}}],
        }))
        return file


class Node:
    """A kubelet with containerd and kube-proxy, in namespaces that one idle process holds."""

    def __init__(self, cluster, number):
        self.cluster, self.number = cluster, number
        self.name = f"node-{number}"
        self.address = f"10.0.0.{10 + number}"
        self.pods = f"10.244.{number}.0/24"
        self.gateway = f"10.244.{number}.1"
        self.folder = RUN / self.name
        self.holder = None

    def enter(self, *words):
        return ["nsenter", f"--target={self.holder.pid}", "--mount", "--net", "--uts", *map(str, words)]

    def start(self):
        self.namespaces()
        self.network()
        self.containerd()
        self.kubelet()
        self.proxy()

    def namespaces(self):
        """Its own /var and /run, so that nodes do not share the state of containers and volumes."""
        var, sysctl = self.folder / "var", self.folder / "sysctl"
        for folder in ("lib", "log", "tmp"):
            (var / folder).mkdir(parents=True)
        (var / "run").symlink_to("/run")
        lines = ["set -e", f"hostname {self.name}", "mount -t tmpfs run /run", f"mount --bind {var} /var"]
        for name, value in SYSCTLS.items():
            file = sysctl / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{value}\n")
            lines.append(f"mount --bind {file} /proc/sys/{name}")
        ready = self.folder / "ready"
        lines += [f"touch {ready}", "exec sleep infinity"]
        words = ["unshare", "--net", "--mount", "--uts", "bash", "-c", "\n".join(lines)]
        self.holder = self.cluster.start(f"{self.name}-namespaces", words)
        wait(f"namespaces of {self.name}", ready.exists, 30)

    def network(self):
        link = f"node{self.number}"
        command("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", str(self.holder.pid))
        command("ip", "link", "set", link, "master", BRIDGE, "up")
        command("ip", "route", "add", self.pods, "via", self.address)
        inside = [
            "ip link set lo up", "ip link set eth0 up",
            f"ip address add {self.address}/24 dev eth0", f"ip route add default via {CONTROL}",
            "echo 1 >/proc/sys/net/ipv4/ip_forward",
            *[f"ip route add {node.pods} via {node.address}" for node in self.cluster.nodes if node is not self],
        ]
        command(*self.enter("bash", "-ec", "\n".join(inside)))

    def containerd(self):
        network = self.folder / "network"
        network.mkdir()
        (network / "10-pods.conflist").write_text(json.dumps({"cniVersion": "1.0.0", "name": "pods", "plugins": [
            # Routed, without a bridge: kube-proxy sees every packet.
            {"type": "ptp", "ipam": {"type": "host-local", "ranges": [[{"subnet": self.pods}]], "routes": [{"dst": "0.0.0.0/0"}],
                                     "dataDir": str(self.folder / "addresses")}},
        ]}))
        file = self.folder / "containerd.toml"
        file.write_text(f"""version = 3
root = "{self.folder}/containerd"
state = "/run/containerd"
disabled_plugins = ["io.containerd.nri.v1.nri", "io.containerd.internal.v1.tracing"]
[grpc]
address = "/run/containerd.sock"
[plugins."io.containerd.cri.v1.images".pinned_images]
sandbox = "{self.cluster.pause}"
[plugins."io.containerd.cri.v1.runtime"]
# Where root lacks CAP_SYS_RESOURCE, a lower one than that of this process is refused.
restrict_oom_score_adj = true
[plugins."io.containerd.cri.v1.runtime".cni]
bin_dirs = ["{BIN}"]
conf_dir = "{network}"
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
BinaryName = "{self.cluster.runc}"
SystemdCgroup = false
""")
        self.cluster.start(f"{self.name}-containerd", self.enter(BIN / "containerd", "--config", file))
        ctr = self.enter(BIN / "ctr", "--address", "/run/containerd.sock", "--namespace", "k8s.io")
        wait(f"containerd of {self.name}", lambda: command(*ctr, "version"), 60)
        for image in self.cluster.images:
            command(*ctr, "images", "import", "--local", image)

    def kubelet(self):
        self.cluster.cgroups(self.name)
        file = self.folder / "kubelet.json"
        file.write_text(json.dumps({
            "apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
            "authentication": {"x509": {"clientCAFile": str(self.cluster.certificates.ca)}, "anonymous": {"enabled": False}},
            "containerRuntimeEndpoint": "unix:///run/containerd.sock",
            "cgroupDriver": "cgroupfs", "cgroupRoot": f"/{isolation.cgroup()}/{self.name}", "enforceNodeAllocatable": [],
            "clusterDNS": [CONTROL], "clusterDomain": "cluster.local", "resolvConf": "",
            "failSwapOn": False, "imageGCHighThresholdPercent": 100,
            "evictionHard": {"nodefs.available": "1%", "imagefs.available": "1%"},
            "nodeStatusUpdateFrequency": "4s", "syncFrequency": "20s", "registerNode": True,
            "podLogsDir": str(self.folder / "pods"), "volumePluginDir": str(self.folder / "plugins"),
        }))
        config = self.cluster.certificates.kubeconfig(self.name, f"/O=system:nodes/CN=system:node:{self.name}")
        self.cluster.start(f"{self.name}-kubelet", self.enter(
            BIN / "kubelet", f"--config={file}", f"--kubeconfig={config}", f"--hostname-override={self.name}",
            f"--node-ip={self.address}", f"--root-dir={self.folder}/kubelet"))

    def proxy(self):
        self.cluster.start(f"{self.name}-proxy", self.enter(
            BIN / "kube-proxy", f"--kubeconfig={self.cluster.proxy_config}", f"--hostname-override={self.name}",
            "--proxy-mode=nftables", f"--cluster-cidr={PODS}", "--conntrack-max-per-core=0", "--conntrack-tcp-timeout-established=0s",
            "--conntrack-tcp-timeout-close-wait=0s", "--nodeport-addresses=primary"))


class Cluster:
    """The whole cluster. `images` are archives that every node gets."""

    def __init__(self, images, nodes=2):
        self.images = [pause_image(), *images]
        self.pause = PAUSE
        self.runc = None
        self.helm_program = BIN / "helm"
        self.processes, self.commands = {}, {}
        self.nodes = [Node(self, number) for number in range(1, nodes + 1)]
        self.certificates = self.admin = self.proxy_config = None
        self.environment = {**os.environ, "PATH": f"{BIN}:{PACKAGES}/usr/sbin:{os.environ['PATH']}"}

    def start(self, name, words, **environment):
        """Starts a process whose output goes to a file."""
        with open(RUN / f"{name}.log", "wb") as log:
            process = subprocess.Popen([str(word) for word in words], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                       env={**self.environment, **environment})
        self.processes[name] = process
        self.commands[name] = words
        return process

    def without(self, name, function):
        """Calls the function while a process of the control plane is gone, which then starts anew."""
        process = self.processes.pop(name)
        process.kill()
        process.wait()
        try:
            function()
        finally:
            self.start(name, self.commands[name])

    def check(self):
        for name, process in self.processes.items():
            if process.poll() is not None:
                lines = (RUN / f"{name}.log").read_text(errors="replace").splitlines()[-8:]
                raise SystemExit(f"{name} has ended with status {process.returncode}:\n" + "\n".join(lines))

    def cgroups(self, name):
        for controller in isolation.controllers():
            folder = controller / isolation.cgroup() / name
            folder.mkdir()
            for file in ("cpuset.cpus", "cpuset.mems"):
                if (folder / file).exists():
                    (folder / file).write_text((controller / isolation.cgroup() / file).read_text())

    def up(self):
        started = time.monotonic()
        shutil.rmtree(RUN, ignore_errors=True)
        RUN.mkdir(parents=True)
        install_packages()
        self.runc = with_libraries("runc")
        with_libraries("nft")
        self.network()
        self.control_plane()
        print(f"control plane ready after {time.monotonic() - started:.1f} s", flush=True)
        for node in self.nodes:
            node.start()
        for node in self.nodes:
            self.wait(f"{node.name} Ready", lambda node=node: self.ready(node.name))
        print(f"{len(self.nodes)} nodes ready after {time.monotonic() - started:.1f} s", flush=True)

    def wait(self, what, condition, seconds=READY_SECONDS):
        def checked():
            self.check()
            return condition()
        return wait(what, checked, seconds)

    def ready(self, node):
        conditions = self.get("node", node)["status"]["conditions"]
        return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)

    def network(self):
        command("ip", "link", "set", "lo", "up")
        command("ip", "link", "add", BRIDGE, "type", "bridge")
        command("ip", "address", "add", f"{CONTROL}/24", "dev", BRIDGE)
        command("ip", "link", "set", BRIDGE, "up")
        command("ip", "route", "add", "default", "dev", BRIDGE)
        pathlib.Path("/proc/sys/net/ipv4/ip_forward").write_text("1")

    def control_plane(self):
        self.certificates = certificates = Certificates(RUN / "certificates")
        first = str(next(ipaddress.ip_network(SERVICES).hosts()))
        names = ("kubernetes", "kubernetes.default", "kubernetes.default.svc", "127.0.0.1")
        server, server_key = certificates.sign("apiserver", "/CN=kube-apiserver", [*names, CONTROL, first])
        kubelet, kubelet_key = certificates.sign("apiserver-kubelet", "/O=system:masters/CN=kube-apiserver-kubelet-client")
        front, front_key = certificates.sign("front-proxy", "/CN=front-proxy")
        account_key = certificates.key("service-accounts")
        account_public = account_key.with_suffix(".pub")
        command("openssl", "pkey", "-in", account_key, "-pubout", "-out", account_public)
        self.admin = certificates.kubeconfig("admin", "/O=system:masters/CN=admin")
        self.proxy_config = certificates.kubeconfig("kube-proxy", "/CN=system:kube-proxy")
        self.environment["KUBECONFIG"] = str(self.admin)
        self.start("etcd", [BIN / "etcd", f"--data-dir={RUN}/etcd", "--unsafe-no-fsync", "--log-level=warn"])
        self.start("kube-apiserver", [
            BIN / "kube-apiserver", "--etcd-servers=http://127.0.0.1:2379", f"--advertise-address={CONTROL}",
            f"--service-cluster-ip-range={SERVICES}",
            "--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction",
            f"--client-ca-file={certificates.ca}", f"--tls-cert-file={server}", f"--tls-private-key-file={server_key}",
            f"--kubelet-client-certificate={kubelet}", f"--kubelet-client-key={kubelet_key}",
            "--kubelet-preferred-address-types=InternalIP",
            f"--service-account-key-file={account_public}", f"--service-account-signing-key-file={account_key}",
            "--service-account-issuer=https://kubernetes.default.svc",
            # For APIs of metrics.
            f"--requestheader-client-ca-file={certificates.ca}", "--requestheader-allowed-names=front-proxy",
            "--requestheader-extra-headers-prefix=X-Remote-Extra-", "--requestheader-group-headers=X-Remote-Group",
            "--requestheader-username-headers=X-Remote-User",
            f"--proxy-client-cert-file={front}", f"--proxy-client-key-file={front_key}",
            "--enable-aggregator-routing=true"])
        self.wait("API server", lambda: self.kubectl("get", "--raw", "/readyz"))
        controllers = certificates.kubeconfig("kube-controller-manager", "/CN=system:kube-controller-manager")
        self.start("kube-controller-manager", [
            BIN / "kube-controller-manager", f"--kubeconfig={controllers}", "--leader-elect=false",
            f"--root-ca-file={certificates.ca}",
            f"--service-account-private-key-file={account_key}", "--use-service-account-credentials=true",
            "--horizontal-pod-autoscaler-sync-period=5s"])
        scheduler = certificates.kubeconfig("kube-scheduler", "/CN=system:kube-scheduler")
        self.start("kube-scheduler", [BIN / "kube-scheduler", f"--kubeconfig={scheduler}", "--leader-elect=false"])
        names = RUN / "Corefile"
        names.write_text(f".:53 {{\n    errors\n    ready {CONTROL}:8181\n"
                         f"    kubernetes cluster.local {{\n        kubeconfig {self.admin}\n        ttl 1\n    }}\n}}\n")
        self.start("coredns", [BIN / "coredns", "-conf", names])
        self.wait("CoreDNS", lambda: urllib.request.urlopen(f"http://{CONTROL}:8181/ready", timeout=2).status == 200)

    def kubectl(self, *words, **options):
        return command(BIN / "kubectl", *words, env=self.environment, **options)

    def get(self, *words):
        return json.loads(self.kubectl("get", *words, "--output=json"))

    def apply(self, *documents):
        self.kubectl("apply", "--filename=-", input=json.dumps({"apiVersion": "v1", "kind": "List", "items": documents}))

    def helm(self, *words):
        return command(self.helm_program, *words, env={**self.environment, "HOME": str(RUN)})


PAUSE = "localhost/pause:inflight"


def pause_image():
    """An image archive with the program of modules/pause."""
    sys.path.insert(0, str(ROOT / "deploy/image"))
    import oci
    output, folder = TOOLS / "pause.tar", TOOLS / "pause-layout"
    shutil.rmtree(folder, ignore_errors=True)
    archive = oci.Archive(folder, 0)
    layer = archive.layer({"pause": oci.Entry(0o755, (BIN / "pause").read_bytes())})
    config = {"architecture": "amd64", "os": "linux", "config": {"Entrypoint": ["/pause"], "User": "65535:65535", "Labels": {}},
              "rootfs": {"type": "layers", "diff_ids": [layer.diff_id]}}
    archive.finish(output, [layer], config, PAUSE)
    shutil.rmtree(folder)
    return output


def install_packages():
    """Packages of Debian, unpacked: runc and nft, with their libraries."""
    lines = (HERE / "packages.txt").read_text().splitlines()
    names = [line.split()[0] for line in lines if line and not line.startswith("#")]
    folder = PACKAGES.parent
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        if not list(folder.glob(f"{name}_*.deb")):
            raise SystemExit(f"{folder} lacks the package {name}: run tests/kubernetes/build")
        if not (PACKAGES / f"usr/share/doc/{name}").exists():
            command("dpkg", "-x", next(folder.glob(f"{name}_*.deb")), PACKAGES)


def with_libraries(name):
    """A script in BIN that runs a program of the packages with their libraries."""
    script = BIN / name
    libraries = PACKAGES / "usr/lib/x86_64-linux-gnu"
    script.write_text(f"#!/bin/sh\nexport LD_LIBRARY_PATH={libraries}\nexec {PACKAGES}/usr/sbin/{name} \"$@\"\n")
    script.chmod(0o755)
    return script
