#!/bin/sh
# Installs what the tests need of Debian's packages, as root on Debian or Ubuntu; elsewhere it says what is missing and which tests
# are skipped. The tests start servers of their own: no package may start one beside them.
set -eu
PATH="$PATH:/usr/sbin:/usr/local/sbin:/sbin"
can_install=; [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1 && can_install=yes

packages=
# need TEST PACKAGES WHAT: unless TEST passes, PACKAGES are to be installed, or WHAT is told to be skipped
need() {
    if sh -c "$1" >/dev/null 2>&1; then return; fi
    if [ -n "$can_install" ]; then packages="$packages $2"; else echo "$2: not installed; skipped: $3"; fi
}

if [ -z "${SNAPCORE_TEST_POSTGRES:-}" ]; then
    need 'ls /usr/lib/postgresql/*/bin/initdb || command -v initdb' postgresql "tests on Postgres (or set SNAPCORE_TEST_POSTGRES)"
fi
if [ -z "${SNAPCORE_TEST_DOCKER:-}" ]; then
    need 'command -v dockerd' docker.io "tests on a Docker engine (or set SNAPCORE_TEST_DOCKER)"
    need 'command -v debootstrap' debootstrap "images of whole systems"
fi
need 'test -x /bin/busybox' busybox-static "sandboxes with busybox alone"
need 'command -v sshd' openssh-server "sandboxes behind ssh"
need 'command -v bsdtar' libarchive-tools "archives as libarchive reads them"
need 'command -v systemd-analyze' systemd "what systemd makes of the units of cron install"
need 'command -v crontab' cron "what cron makes of the lines of cron install"
need 'command -v git' git "patches as git takes them, repositories in a workspace"
need 'command -v zsh' zsh "completion in zsh"
need 'command -v fish' fish "completion in fish"
need 'command -v patch' patch "patches as patch takes them"

[ -n "$packages" ] || exit 0
echo "installing$packages"
mkdir -p /etc/postgresql-common/createcluster.d /etc/ssh
echo "create_main_cluster = false" >/etc/postgresql-common/createcluster.d/snapcore-tests.conf
command -v sshd >/dev/null 2>&1 || touch /etc/ssh/sshd_not_to_be_run
if [ ! -e /usr/sbin/policy-rc.d ]; then # asked by each package that would start a service; 101: no
    printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d
    chmod 755 /usr/sbin/policy-rc.d
    trap 'rm -f /usr/sbin/policy-rc.d' EXIT
fi
export RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive
# shellcheck disable=SC2086  # one word a package
apt-get install -y -qq --no-install-recommends $packages >/dev/null || {
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends $packages >/dev/null
}
